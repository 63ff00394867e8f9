"""Policies of what the backward pass keeps: the same gradient at other costs in memory."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from purepost.models import (
    Config,
    Decoder,
    Neftune,
    init_decoder,
    remat,
    with_reference,
    with_remat,
)
from purepost.rollout.score import score
from purepost.types import causal_rows
from purepost.weights import add_lora
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("full_compilation")

POLICIES = {"none": remat.none, "dots": remat.dots, "block": remat.block}
CONFIG = Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=128,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
)
ROWS = causal_rows(jr.randint(jr.key(1), (4, 32), 0, 32), jnp.asarray([32, 20, 32, 7]))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


def gradient(model: Decoder) -> tuple[Decoder, int]:
    """Of the mean log-probability, and the bytes that computing it takes beside the model."""
    program = jax.jit(jax.grad(lambda m: score(m, ROWS).logps.mean())).lower(model).compile()
    analysis: Any = program.memory_analysis()
    return program(model), analysis.temp_size_in_bytes


def test_policies_give_one_gradient_and_differ_in_memory(model: Decoder) -> None:
    found = {name: gradient(with_remat(model, policy)) for name, policy in POLICIES.items()}
    expected = found["none"][0]
    for grads, _ in found.values():
        assert_close(jax.tree.leaves(grads), jax.tree.leaves(expected), relative=1e-6)
    memory = {name: size for name, (_, size) in found.items()}
    assert memory["block"] < memory["dots"] < memory["none"]
    # All that `block` keeps of a layer is its input.
    kept = CONFIG.num_layers * ROWS.tokens.size * CONFIG.hidden_size * 4
    assert memory["none"] - memory["block"] > 5 * kept


def test_a_policy_reaches_every_decoder_and_touches_no_weight(model: Decoder) -> None:
    models = with_reference(Neftune(add_lora(model, rank=2, key=jr.key(2))))
    changed = with_remat(models, remat.block)
    for neftune in (changed.policy, changed.reference):
        assert neftune is not None and neftune.decoder.remat is remat.block
    assert models.policy.decoder.remat is remat.dots
    same = zip(jax.tree.leaves(models), jax.tree.leaves(changed), strict=True)
    assert all(x is y for x, y in same)
    with pytest.raises(ValueError, match="expected a Decoder or models that hold one, got dict"):
        with_remat({"policy": 1.0}, remat.block)


def test_a_policy_may_be_any_of_jax(model: Decoder) -> None:
    everything = partial(
        jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False
    )
    custom = eqx.filter_jit(with_remat(model, everything))(ROWS)[0]
    assert_close(custom, eqx.filter_jit(model)(ROWS)[0], relative=1e-6)
