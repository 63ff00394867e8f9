"""References of models with adapters: right whatever the adapter began as, and no second copy of
the weights.
"""

import gc
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jaxtyping import PyTree

from experiments.probes import preferences
from purepost import TrainState, train
from purepost.algorithms import dpo
from purepost.models.containers import WithReference, with_reference
from purepost.models.critic import actor_critic
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.weights import (
    adapter_of,
    adapters,
    add_lora,
    has_adapters,
    quantize,
    with_adapter,
    without_lora,
)

CONFIG = Config(
    vocab_size=12,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


def trained(model: Decoder) -> Decoder:
    """The model as a run has left its adapters."""
    move = lambda x, on: x + 0.1 * jr.normal(jr.key(x.size), x.shape) if on else x  # noqa: E731
    return jax.tree.map(move, model, adapters(model))


def nbytes(tree: PyTree) -> int:
    """Bytes of the arrays, each counted once."""
    return sum({id(x): x.nbytes for x in jax.tree.leaves(tree)}.values())


def live() -> int:
    """Bytes of every array that there is."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture(scope="module")
def base() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


def first_loss(models: WithReference[Decoder]) -> tuple[float, TrainState]:
    """The loss of the first step, and the state after it."""
    algorithm = dpo(optax.adam(0.01), beta=0.1)
    state = algorithm.init(jr.key(0), models)
    steps = train(algorithm, state, preferences.paired(0), key=jr.key(1), steps=1)
    _, state, metrics = next(steps)
    return float(metrics["loss"].value), state


def test_the_reference_of_a_trained_adapter_is_that_adapter(base: Decoder) -> None:
    """The first loss is ln 2; the bare base as the reference gives another."""
    policy = trained(add_lora(base, rank=2, key=jr.key(1)))
    loss, state = first_loss(with_reference(policy))
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    wrong, _ = first_loss(WithReference(policy, without_lora(policy)))
    assert abs(wrong - math.log(2)) > 1e-3
    # It stays what it was when the policy has moved.
    kept, began = adapter_of(state.frozen.reference), adapter_of(policy)
    for name, w in began.items():
        np.testing.assert_array_equal(kept[name].a, w.a)
        np.testing.assert_array_equal(kept[name].b, w.b)
        assert (adapter_of(state.models.policy)[name].b != w.b).any()


@pytest.mark.parametrize("bits", [32, 4])
def test_a_reference_costs_its_adapter_and_no_weights(base: Decoder, bits: int) -> None:
    """Measured: of all arrays that are alive, and of those that a state holds, before and after a
    step.
    """
    model = base if bits == 32 else quantize(base, block=16)
    fresh = add_lora(model, rank=2, key=jr.key(1))
    own = sum(x.nbytes for w in adapter_of(fresh).values() for x in (w.a, w.b))
    for policy, copies in ((fresh, 0), (trained(fresh), 1)):
        models = with_reference(policy)
        assert has_adapters(models.reference) == bool(copies)
        before = live()
        algorithm = dpo(optax.adam(0.01))
        state = algorithm.init(jr.key(0), models)
        # The policy's copy and Adam's two moments; what `models` holds was there.
        assert live() - before < 3 * own + 100
        steps = train(algorithm, state, preferences.paired(0), key=jr.key(1), steps=1)
        for _, state, _ in steps:
            assert nbytes((state.params, state.frozen)) == nbytes(model) + (1 + copies) * own
            assert live() - before < 3 * own + 16384  # a batch, metrics


def test_policy_critic_and_reference_share_one_base(base: Decoder) -> None:
    """Each with an adapter of its own, by name."""
    quantized = quantize(base, block=16)
    named = {
        name: adapter_of(trained(add_lora(quantized, rank=rank, key=jr.key(rank))))
        for name, rank in (("policy", 2), ("reference", 3), ("critic", 4))
    }
    policy, reference, critic = (with_adapter(quantized, a) for a in named.values())
    models = actor_critic(WithReference(policy, reference))
    assert nbytes((models.policy, models.reference, critic)) == nbytes(quantized) + nbytes(named)
    assert adapter_of(models.reference).keys() == named["reference"].keys()
    swapped = with_adapter(policy, named["critic"])
    np.testing.assert_array_equal(
        jnp.asarray(adapter_of(swapped)["layers.mlp.up"].a), named["critic"]["layers.mlp.up"].a
    )
