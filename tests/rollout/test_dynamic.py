"""Dynamic sampling: which groups are kept, in which order, after how many draws; fused or not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array, Float

from purepost.mean import Metrics, scalar_mean
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.rollout.collect import Episodes, Tasks
from purepost.rollout.dynamic import dynamic
from purepost.rollout.sample import STOP, pad_prompts
from purepost.types import KeyArray

CONFIG = Config(
    vocab_size=4,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
)
MODEL = init_decoder(jr.key(0), CONFIG)


def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
    """Two episodes of each prompt, all the first before all the second; their rewards are the
    column's.
    """
    p = tasks.prompts.lengths.shape[0]
    rewards: Float[Array, "p 2"] = jnp.asarray(tasks.columns["rewards"])
    episodes = Episodes(
        prompts=tasks.prompts,
        group=jnp.tile(jnp.arange(p, dtype=jnp.int32), 2),
        tokens=jnp.tile(tasks.prompts.tokens[:, :1], (2, 3)),
        lengths=jnp.full(2 * p, 3, jnp.int32),
        mask=jnp.ones((2 * p, 3), bool),
        logps=-jnp.ones((2 * p, 3)),
        rewards=rewards.T.reshape(-1),
        finish=jnp.full(2 * p, STOP, jnp.int32),
        temperature=jnp.ones(2 * p),
    )
    return episodes, {"calls": scalar_mean(1.0)}


def pool(rewards: list[list[float]]) -> Tasks:
    """A prompt for each pair of rewards, of its number as its only token."""
    prompts = pad_prompts([[10 + i] for i in range(len(rewards))], width=1)
    return Tasks(prompts, {"rewards": jnp.asarray(rewards, jnp.float32)})


NAN = float("nan")
# Mixed: 1, 2, 5 and 6, of four draws of two prompts.
POOL = [[1, 1], [0, 1], [1, 0], [NAN, 1], [0, 0], [0, 1], [0, 1], [0, 0]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("rewards", "kept", "draws"),
    [
        (POOL, [11, 12], 2),
        ([[0, 1], [1, 0], *POOL[2:]], [10, 11], 1),
        ([[0, 0]] * 5 + [[0, 1]] * 3, [15, 16], 4),
        ([[0, 0]] * 7 + [[0, 1]], [17, 0], 4),
        ([[0, 0]] * 8, [0, 0], 4),
    ],
)
def test_the_first_mixed_groups_are_kept_in_draw_order(fused, rewards, kept, draws):
    run = dynamic(collect, 4)
    run = eqx.filter_jit(run) if fused else run
    episodes, metrics = run(jr.key(0), MODEL, pool(rewards))
    np.testing.assert_array_equal(episodes.prompts.tokens[:, 0], kept)
    np.testing.assert_array_equal(episodes.group, [0, 0, 1, 1])
    np.testing.assert_array_equal(episodes.tokens[:, 0], np.repeat(kept, 2))
    there = np.repeat(kept, 2) > 0
    np.testing.assert_array_equal(np.isfinite(episodes.rewards), there)
    np.testing.assert_array_equal(episodes.mask.any(1), there)
    expected = [rewards[k - 10] for k in kept if k]
    np.testing.assert_array_equal(episodes.rewards[there], np.reshape(expected, -1))
    assert metrics["dynamic/draws"].value == draws == metrics["calls"].weight
    np.testing.assert_allclose(metrics["dynamic/frac_filler"].value, kept.count(0) / 2)


def test_the_metrics_are_of_all_that_was_drawn():
    _, metrics = dynamic(collect, 4)(jr.key(0), MODEL, pool(POOL))
    np.testing.assert_allclose(metrics["reward"].value, 5 / 7)
    np.testing.assert_allclose(metrics["frac_reward_zero_std"].value, 0.5)
    np.testing.assert_allclose(metrics["frac_unscored"].value, 1 / 8)


def test_lists_of_columns_are_cut_like_arrays():
    seen = []

    def noting(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        seen.append(tasks.columns["name"])
        return collect(key, model, tasks)

    tasks = pool(POOL)
    tasks.columns["name"] = list("abcdefgh")
    dynamic(noting, 4)(jr.key(0), MODEL, tasks)
    assert seen == [["a", "b"], ["c", "d"]]


def test_draws_that_do_not_divide_the_pool_are_errors():
    with pytest.raises(ValueError, match="draws ≥ 1, got 0"):
        dynamic(collect, 0)
    for draws in (3, 16):
        with pytest.raises(ValueError, match=f"a pool of prompts that {draws} draws divide, got 8"):
            dynamic(collect, draws)(jr.key(0), MODEL, pool(POOL))


def test_every_draw_has_its_own_key():
    keys = []

    def noting(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        keys.append(jax.random.key_data(key).tolist())
        return collect(key, model, tasks)

    dynamic(noting, 4)(jr.key(0), MODEL, pool([[0, 0]] * 8))
    assert len({tuple(k) for k in keys}) == 4
