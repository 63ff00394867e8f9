"""From episodes to rows, in any order and any split; the metrics of a step by hand."""

from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from purepost.advantages import group_normalized
from purepost.algorithms import grpo
from purepost.mean import Mean, Metrics, scalar_mean
from purepost.models import Decoder
from purepost.models.containers import WithReference
from purepost.policy_batch import outcomes_of
from purepost.rollout.collect import Episodes, Lay, Tasks, episode_metrics, single_turn, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.packing import Packed
from purepost.rollout.sample import LENGTH, STOP, Completions, generate, pad_prompts
from purepost.types import check_rows

LENGTHS = [3, 1, 2, 4, 4, 1, 2, 3]


def episodes(order: list[int], rewards: list[float] | None = None) -> Episodes:
    """Eight episodes of two prompts, A's first, in the order given: token e is 2 + e at all t."""
    pick = np.array(order)
    n, t = len(order), 4
    lengths = np.array(LENGTHS)[pick]
    mask = np.arange(t) < lengths[:, None]
    tokens = np.where(mask, 2 + pick[:, None], 0)
    values = np.arange(8.0) % 3 if rewards is None else np.array(rewards)
    logps = np.where(mask, -1.0 - pick[:, None] - np.arange(t) / 10, 0)
    return Episodes(
        prompts=pad_prompts([[11, 12, 13], [14]], width=3),
        group=jnp.asarray(pick // 4, jnp.int32),
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        mask=jnp.asarray(mask),
        logps=jnp.asarray(logps, jnp.float32),
        rewards=jnp.asarray(values[pick], jnp.float32),
        finish=jnp.asarray(np.where(lengths == t, LENGTH, STOP), jnp.int32),
        temperature=jnp.ones(n),
    )


rows_of = eqx.filter_jit(to_rows)
ORDERS = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7], [7, 2, 4, 0, 1, 6, 5, 3]]


@pytest.mark.parametrize("per_row", [4, 2, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_hold_whole_groups_wherever_episodes_stand(order: list[int], per_row: int) -> None:
    e = episodes(order)
    rows, places = rows_of(e, per_row=per_row)
    check_rows(rows)
    assert rows.tokens.shape == (8 // per_row, 3 + 4 * per_row)
    assert (rows.episodes, rows.capacity) == (per_row, 4 * per_row)
    assert sorted(places.episodes.reshape(-1).tolist()) == list(range(8))
    logps = places.per_token(e.logps)
    for row in range(8 // per_row):
        group = [order[i] // 4 for i in places.episodes[row].tolist()]
        assert len(set(group)) == 1
        prompt = [[11, 12, 13], [14, 0, 0]][group[0]]
        assert rows.tokens[row, :3].tolist() == prompt
        assert not rows.mask[row, :3].any() and not logps[row, :3].any()
        for branch, i in enumerate(places.episodes[row].tolist()):
            here = slice(3 + 4 * branch, 7 + 4 * branch)
            np.testing.assert_array_equal(rows.tokens[row, here], e.tokens[i])
            np.testing.assert_array_equal(rows.mask[row, here], e.mask[i])
            np.testing.assert_array_equal(logps[row, here], e.logps[i])
            assert (rows.episode[row, here] == branch).all()


def test_places_of_numbers_per_episode() -> None:
    _, places = rows_of(episodes(ORDERS[1]), per_row=2)
    assert places.episodes.tolist() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert places.per_episode(jnp.arange(8.0) * 10).tolist() == [
        [0.0, 20.0],
        [40.0, 60.0],
        [10.0, 30.0],
        [50.0, 70.0],
    ]


def test_a_mask_inside_a_completion_stays() -> None:
    """What a tool said between two turns is not trained, and is read all the same."""
    e = episodes(ORDERS[0])
    e = eqx.tree_at(lambda e: e.mask, e, e.mask.at[3, 1].set(False))
    rows, _ = rows_of(e)
    check_rows(rows)
    assert rows.mask[0, 15:19].tolist() == [True, False, True, True]
    assert rows.parent[0, 15:19].tolist() == [2, 15, 16, 17]


def test_groups_that_rows_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="groups of 4 do not divide into rows of 3 episodes"):
        to_rows(episodes(ORDERS[0]), per_row=3)


def step(model: Decoder, e: Episodes, lay: Lay) -> tuple[dict[str, Mean], Decoder]:
    """The terms and the gradient of GRPO on the episodes."""

    def collect(key: Any, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        return e, {}

    algorithm = grpo(optax.sgd(0.1), collect, lay=lay, entropy=0.1)
    models = WithReference(model)
    state = algorithm.init(jr.key(0), models)
    batch, _ = algorithm.rollout(jr.key(0), state, Tasks(e.prompts))

    @eqx.filter_jit
    def terms_and_gradient(models: WithReference[Decoder]) -> tuple[Any, Any]:
        def loss(models: WithReference[Decoder]) -> tuple[jax.Array, dict[str, Mean]]:
            terms, _ = algorithm.loss(jr.key(0), models, batch)
            return terms["policy"].value + terms["entropy"].value, terms

        grads, terms = eqx.filter_grad(loss, has_aux=True)(models)
        return terms, grads

    terms, grads = terms_and_gradient(models)
    return terms, cast(Any, grads).policy


def test_a_split_or_shuffled_group_trains_the_same(model: Decoder) -> None:
    """In one row, in two, in four and packed, in order and not: loss and gradient agree to 1e-5."""
    want, gradient = step(model, episodes(ORDERS[0]), to_rows)
    assert float(want["policy"].weight) == 8
    for order, lay in (
        (ORDERS[1], partial(to_rows, per_row=2)),
        (ORDERS[2], partial(to_rows, per_row=1)),
        (ORDERS[1], Packed()),
        (ORDERS[2], Packed(width=10, multiple=3)),
    ):
        terms, again = step(model, episodes(order), lay)
        for name, mean in want.items():
            # At ratio 1 the policy's terms cancel: the scale of the sum is that of its parts.
            np.testing.assert_allclose(terms[name].value, mean.value, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(terms[name].weight, mean.weight, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(gradient), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_a_group_is_its_id_not_its_text_or_place(model: Decoder) -> None:
    """Two prompts of one text, rewards [0, 0] and [1, 1]: in any order no advantage at all."""
    order = [0, 4, 1, 5]  # A0, B0, A1, B1
    e = episodes(order, rewards=[0, 0, 0, 0, 1, 1, 1, 1])
    twice = pad_prompts([[11, 12], [11, 12]], width=3)
    e = eqx.tree_at(lambda e: e.prompts, e, twice)
    assert group_normalized(outcomes_of(e)).tolist() == [0.0] * 4
    rows, places = rows_of(e)
    assert places.episodes.tolist() == [[0, 2], [1, 3]]
    assert places.per_episode(e.rewards).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert rows.tokens[:, 3].tolist() == [2, 6]  # the first tokens of A0 and of B0


def test_metrics_by_hand() -> None:
    """Rewards [1, 0, –, 1, 2, –, 0, 0] with NaN and inf unscored; lengths and ends as above."""
    e = episodes(ORDERS[0], rewards=[1, 0, np.nan, 1, 2, np.inf, 0, 0])
    values = {name: mean.value for name, mean in eqx.filter_jit(episode_metrics)(e).items()}
    scored = np.array([1, 0, 1, 2, 0, 0])
    expected = {
        "reward": 4 / 6,
        "frac_unscored": 2 / 8,
        "completions/mean_length": 20 / 8,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/mean_terminated_length": (3 + 1 + 2 + 1 + 2 + 3) / 6,
        "completions/clipped_ratio": 2 / 8,
        "num_tokens": 20,
    }
    for name, value in expected.items():
        assert float(values.pop(name)) == pytest.approx(value, rel=1e-6), name
    for name, x in (("reward/quantiles", scored), ("completions/length/quantiles", LENGTHS)):
        want = np.quantile(x, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1])
        np.testing.assert_allclose(values.pop(name), want, rtol=1e-6, atol=1e-7)
    assert not values


def test_metrics_of_a_step_without_any_score() -> None:
    metrics = eqx.filter_jit(episode_metrics)(episodes(ORDERS[0], rewards=[np.nan] * 8))
    assert all(np.isfinite(m.value).all() for m in metrics.values())
    assert float(metrics["reward"].weight) == 0
    assert float(metrics["frac_unscored"].value) == 1
    assert not metrics["reward/quantiles"].weight.any()


def test_single_turn_scores_and_lists_every_completion(model: Decoder) -> None:
    prompts = pad_prompts([[3, 1], [4]], ids=[5, 9], width=2)
    seen = []

    def reward(tasks: Tasks, completions: Completions) -> tuple[jax.Array, Metrics]:
        seen.append(tasks.columns)
        base = jnp.asarray(tasks.columns["base"])[:, None]
        return base + completions.lengths.astype(jnp.float32), {"seen": scalar_mean(1.0)}

    sampling = Sampling(4, jnp.asarray(0.0), stop_ids=(2, 9, 11))
    columns = {"base": jnp.asarray([10.0, 20.0])}
    e, metrics = single_turn(reward, sampling, group=3)(jr.key(0), model, Tasks(prompts, columns))
    c = generate(jr.key(0), model, prompts, sampling, group=3)
    assert seen == [columns] and float(metrics["seen"].value) == 1
    assert e.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert e.rewards.tolist() == (np.repeat([10, 20], 3) + c.lengths.reshape(6)).tolist()
    for name in ("tokens", "lengths", "mask", "logps", "finish"):
        got, want = vars(e)[name], c.mask if name == "mask" else vars(c)[name]
        np.testing.assert_array_equal(got, want.reshape(got.shape))
    assert e.temperature.tolist() == [1.0] * 6  # greedy: log-probabilities at 1
    with pytest.raises(ValueError, match="expected group ≥ 1, got 0"):
        single_turn(reward, sampling, group=0)
