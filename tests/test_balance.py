"""The load-balancing term: transformers' values, any split of the batch, what it does to a load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from purepost.algorithm import Algorithm, accumulate_gradient
from purepost.algorithms import dpo, grpo, sft
from purepost.balance import trained_model, trained_rows, with_load_balancing
from purepost.mean import Metrics, Terms
from purepost.models import Config, Decoder, init_decoder, with_reference
from purepost.models.hub import load
from purepost.rollout.collect import Completions, Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.labelled import Pairs
from purepost.rollout.sample import pad_prompts
from purepost.types import KeyArray, Rows, causal_rows, group_rows
from tests.compare import assert_close

GOLDEN = Path(__file__).parent / "golden"
CONFIG = Config(*(12, 16, 8, 2, 2, 1, 8), family="qwen3_moe", num_experts=4, experts_per_token=2)
LENGTHS = [9, 5, 9, 3]


def rows() -> Rows:
    tokens = np.random.default_rng(0).integers(0, 12, (4, 9))
    return causal_rows(jnp.asarray(tokens, jnp.int32), jnp.asarray(LENGTHS, jnp.int32))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


def test_the_term_is_transformers_loss() -> None:
    """Of the golden model on its two rows of uneven lengths."""
    golden, tiny = np.load(GOLDEN / "qwen3_moe.npz"), load(GOLDEN / "qwen3_moe").model
    batch = causal_rows(*(jnp.asarray(golden[k], jnp.int32) for k in ("ids", "lengths")))
    algorithm = with_load_balancing(sft(optax.sgd(0.1)), 0.25)
    state = algorithm.init(jr.key(0), tiny)
    balanced, metrics = algorithm.rollout(jr.key(1), state, batch)
    terms, found = eqx.filter_jit(algorithm.loss)(jr.key(2), tiny, balanced)
    want = float(golden["load_balancing_loss"])
    assert float(found["load_balance"].value) == pytest.approx(want, rel=1e-5)
    assert float(terms["load_balance"].value) == pytest.approx(want / 4, rel=1e-5)
    plain, _ = eqx.filter_jit(sft(optax.sgd(0.1)).loss)(jr.key(2), tiny, batch)
    assert float(terms["nll"].value) == pytest.approx(float(plain["nll"].value), rel=1e-6)
    assert 1 < float(metrics["expert_load"].value) < 2  # 6 experts, 3 a token: 2 at most


def test_any_split_of_the_batch_gives_one_gradient(model: Decoder) -> None:
    """Four rows of 9, 5, 9 and 3 tokens: at once, in two parts, in three with two empty rows."""
    algorithm = with_load_balancing(sft(optax.sgd(0.1)), 0.5)
    state = algorithm.init(jr.key(0), model)
    batch, _ = algorithm.rollout(jr.key(1), state, rows())
    whole, two, three = (
        eqx.filter_jit(accumulate_gradient)(
            algorithm.loss, jr.key(2), state.params, state.frozen, batch, parts
        )
        for parts in (1, 2, 3)
    )
    for other in (two, three):
        assert_close(other[0], whole[0])
        assert_close(other[2], whole[2], relative=1e-4)


def test_training_on_the_term_alone_evens_the_load(model: Decoder) -> None:
    """From a router that sends nearly everything to the same experts."""
    lean = jnp.zeros((2, 16, 4)).at[..., :2].set(jnp.sign(jr.normal(jr.key(3), (2, 16, 1))))
    leaning = eqx.tree_at(lambda m: m.layers.mlp.router, model, model.layers.mlp.router + lean)
    trainable = lambda m: eqx.tree_at(  # noqa: E731
        lambda m: m.layers.mlp.router, jax.tree.map(lambda _: False, m), True
    )
    algorithm = with_load_balancing(sft(optax.adam(5e-2), trainable=trainable), 100.0)
    state = algorithm.init(jr.key(0), leaning)
    update, found = eqx.filter_jit(algorithm.update), []
    for step in range(12):
        batch, before = algorithm.rollout(jr.key(step), state, rows())
        state, metrics = update(algorithm.loss, jr.key(step), state, batch)
        found.append({name: float(mean.value) for name, mean in {**before, **metrics}.items()})
    assert found[-1]["expert_load"] < min(found[0]["expert_load"] - 0.2, 1.3)
    for step in found:
        assert step["loss/load_balance"] == pytest.approx(100 * step["load_balance"], rel=1e-6)


def terms_of(algorithm: Algorithm[Any, Any, Any], data: Any, models: Any) -> Terms:
    """The terms of the first loss of an algorithm with balancing."""
    balanced = with_load_balancing(algorithm, 0.01)
    state = balanced.init(jr.key(0), models)
    batch, _ = balanced.rollout(jr.key(1), state, data)
    return eqx.filter_jit(balanced.loss)(jr.key(2), state.models, batch)[0]


def test_policies_and_pairs(model: Decoder) -> None:
    """GRPO and DPO take it as they are; the model is the policy, never the reference."""

    def reward(tasks: Tasks, completions: Completions) -> tuple[jax.Array, Metrics]:
        return (completions.tokens == 5).sum(-1).astype(jnp.float32), {}

    collect = single_turn(reward, Sampling(max_tokens=3), group=2)
    tasks = Tasks(pad_prompts([[1, 2], [3]], width=4))
    pairs = group_rows(
        *(jnp.ones((2, 2), jnp.int32), jnp.asarray([2, 1], jnp.int32)),
        *(jnp.ones((2, 2, 3), jnp.int32), jnp.full((2, 2), 3, jnp.int32)),
        jnp.ones((2, 2, 3), bool),
    )
    models = with_reference(model)
    preferences = Pairs(pairs, jnp.zeros(2), jnp.ones(2, bool))
    for terms in (
        terms_of(grpo(optax.sgd(0.1), collect), tasks, models),
        terms_of(dpo(optax.sgd(0.1)), preferences, models),
    ):
        assert len(terms) == 2
        assert 0.02 <= float(terms["load_balance"].value) < 0.04


def test_errors_name_what_is_missing(model: Decoder) -> None:
    dense = init_decoder(jr.key(0), Config(*(12, 16, 8, 2, 2, 1, 8)))
    algorithm = with_load_balancing(sft(optax.sgd(0.1)), 0.1)
    with pytest.raises(ValueError, match="expected a mixture of experts, got a dense model"):
        algorithm.init(jr.key(0), dense)
    with pytest.raises(ValueError, match="expected 0 < coefficient, got 0"):
        with_load_balancing(algorithm, 0.0)
    with pytest.raises(ValueError, match="expected a Decoder, or one as policy .* got dict"):
        trained_model({})
    with pytest.raises(ValueError, match="expected Rows, or a batch with rows, got list"):
        trained_rows([])

    def of_others(key: KeyArray, models: Decoder, batch: Rows) -> tuple[Terms, Metrics]:
        return sft(optax.sgd(0.1)).loss(key, models, causal_rows(batch.tokens, batch.end[:, 0]))

    state = algorithm.init(jr.key(0), model)
    batch, _ = algorithm.rollout(jr.key(1), state, rows())
    strange = with_load_balancing(replace(sft(optax.sgd(0.1)), loss=of_others), 0.1)
    with pytest.raises(ValueError, match="expected a loss that runs its model on the batch's own"):
        strange.loss(jr.key(0), model, batch)
