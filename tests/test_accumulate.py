"""Sums of gradients: the bits of the plain sum, in the room of one gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array

import purepost.accumulate
from purepost.accumulate import accumulate
from tests.compare import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("full_compilation")

LAYERS, WIDTH, PARTS = 16, 32, 4


def objective(params: dict[str, Array], part: Array) -> tuple[Array, Array]:
    """Of stacked layers, of a matrix that is read twice, and of a vector that is sliced."""
    x = part @ params["first"]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    value = ((x @ params["first"].T)[:, :2].astype(jnp.float32) * params["ends"][:2]).sum()
    return value, jnp.ones(())


def plain(params: Any, parts: Array) -> tuple[Array, Any]:
    """A gradient made, and then added."""

    def body(total: Any, part: Array) -> tuple[Any, None]:
        grads, seen = jax.grad(objective, has_aux=True)(params, part)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jax.tree.map(jnp.add, total, (seen, grads)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    return jax.lax.scan(body, (jnp.zeros(()), zeros), parts)[0]


@pytest.fixture(scope="module")
def params() -> dict[str, Array]:
    k1, k2 = jr.split(jr.key(0))
    return {
        "first": jr.normal(k1, (WIDTH, WIDTH)) / 6,
        "layers": jr.normal(k2, (LAYERS, WIDTH, WIDTH)) / 6,
        "ends": jnp.arange(1.0, 4.0),
    }


PART = jr.normal(jr.key(1), (PARTS, 2, WIDTH))


def compiled(function: Any, params: Any) -> tuple[Any, int]:
    """What it gives, and its temporary memory in bytes."""
    program = jax.jit(function).lower(params, PART).compile()
    analysis: Any = program.memory_analysis()
    return program(params, PART), analysis.temp_size_in_bytes


def in_one(params: Any, parts: Array) -> tuple[Array, Any]:
    return accumulate(objective, params, parts)


def test_the_sum_has_the_bits_of_the_plain_one_and_no_second_gradient(params) -> None:
    (seen, grads), memory = compiled(in_one, params)
    (_, expected), before = compiled(plain, params)
    assert float(seen) == PARTS
    assert_same_bits(grads, expected)
    layers = params["layers"].nbytes
    assert before - memory > 0.9 * layers
    assert memory < 1.4 * sum(x.nbytes for x in params.values())


def test_without_references_the_sum_is_the_same(params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purepost.accumulate, "discharge_state", None)
    (seen, grads), _ = compiled(in_one, params)
    assert float(seen) == PARTS
    assert_same_bits(grads, compiled(plain, params)[0][1])


def test_it_may_be_vmapped_over_either_and_run_without_jit(params) -> None:
    two = lambda x: jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), x)  # noqa: E731
    for axes in ((0, None), (None, 0), (0, 0)):
        inputs = [two(x) if a == 0 else x for x, a in zip((params, PART), axes, strict=True)]
        _, found = jax.jit(jax.vmap(in_one, in_axes=axes))(*inputs)
        _, expected = jax.jit(jax.vmap(plain, in_axes=axes))(*inputs)
        assert_close(found, expected)
    assert_close(in_one(params, PART)[1], plain(params, PART)[1])


def test_parameters_of_fewer_bits_are_summed_in_float32(params) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params) | {"ends": params["ends"]}

    def low(function: Any) -> Any:
        return jax.jit(function)(half, PART.astype(jnp.bfloat16))[1]

    found = low(in_one)
    assert {x.dtype for x in found.values()} == {np.dtype(np.float32)}
    assert_close(found, low(plain), relative=1e-2)
