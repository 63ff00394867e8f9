"""Precisions, the optimizer's recipe, loss scaling."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from purepost import Algorithm, Mean, train
from purepost.algorithm import make_init, make_update
from purepost.guards import Precision, in_precision, loss_scaled, qlora, recipe
from purepost.models import Config, Decoder, init_decoder
from purepost.tree import named_leaves
from purepost.types import causal_rows
from purepost.weights import add_lora, int8, quantize

CONFIG = Config(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
ROWS = causal_rows(jnp.asarray([[1, 2, 3, 4]], jnp.int32), jnp.asarray([4]))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


@pytest.mark.parametrize("precision", list(Precision))
def test_a_model_computes_in_its_precision(model: Decoder, precision: Precision) -> None:
    """Its hidden states have it, its adapters stay float32, and it is near the float32 model."""
    adapted = qlora(model, key=jr.key(1), precision=precision, kind=int8, rank=2)
    found = {name: x.dtype for name, x in named_leaves(adapted)}
    assert found["layers.attention.q.a"] == found["layers.attention.q.b"] == jnp.float32
    assert found["layers.attention.q.base.codes"] == jnp.int8
    assert found["embed"] == found["norm"] == jnp.dtype(precision.value)
    hidden, _ = adapted(ROWS)
    assert hidden.dtype == jnp.dtype(precision.value)
    expected, _ = quantize(model, kind=int8)(ROWS)
    np.testing.assert_allclose(hidden.astype(jnp.float32), expected, atol=0.1)
    back = in_precision(in_precision(add_lora(model, rank=2, key=jr.key(1)), precision), precision)
    assert dict(named_leaves(back))["layers.mlp.up.base"].dtype == jnp.dtype(precision.value)


def test_the_recipe_warms_up_and_decays() -> None:
    """A constant gradient's step is the learning rate: (t + 1)/11 of it, then a cosine to 0."""
    optimizer = recipe(2.0, steps=101, warmup=0.1)
    state = optimizer.init(params := {"w": jnp.zeros(())})
    steps = []
    for _ in range(101):
        with jax.numpy_dtype_promotion("standard"):
            update, state = optimizer.update({"w": jnp.ones(())}, state, params)
        steps.append(-float(update["w"]))  # pyright: ignore
    np.testing.assert_allclose(steps[:11], 2 * np.arange(1, 12) / 11, rtol=1e-4)
    cosine = 1 + np.cos(np.pi * np.arange(91) / 91)
    np.testing.assert_allclose(steps[10:], cosine, rtol=1e-3, atol=1e-3)


def test_the_recipe_clips() -> None:
    """A gradient of 1000 counts as 1: the next one, of 1, finds moments that are all 1."""
    optimizer = recipe(1.0, steps=10, warmup=0.0, clip=1.0)
    state = optimizer.init(params := {"w": jnp.zeros(())})
    with jax.numpy_dtype_promotion("standard"):
        for gradient in (1000.0, 1.0):
            update, state = optimizer.update({"w": jnp.float32(gradient)}, state, params)
    assert float(update["w"]) == pytest.approx(-(1 + np.cos(np.pi / 10)) / 2, rel=1e-4)  # pyright: ignore


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"warmup": 1.0}, {"clip": 0.0}])
def test_recipes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected steps ≥ 1, 0 ≤ warmup < 1 and clip > 0, got"):
        recipe(1.0, **({"steps": 10} | wrong))


def half_precision(optimizer: optax.GradientTransformation) -> Algorithm:
    """Descent on slope · w, computed in two factors, the data, and in float16."""

    def loss(key: Any, models: Any, batch: jax.Array) -> Any:
        first, second = batch[0].astype(jnp.float16)
        total = (models["w"].astype(jnp.float16) * first * second).astype(jnp.float32)
        return {"slope": Mean(total, jnp.ones(()))}, {}

    def everything(models: Any) -> Any:
        return jax.tree.map(lambda _: True, models)

    init = make_init(optimizer, trainable=everything)
    return Algorithm(init, lambda key, state, data: (data, {}), loss, make_update(optimizer))


def descend(algorithm: Algorithm, slope: float, steps: int) -> list[tuple[float, dict[str, float]]]:
    """(w, metrics) after every step from w = 1."""
    state = algorithm.init(jr.key(0), {"w": jnp.float32(1)})
    data = jnp.full((1, 2), slope**0.5)
    run = train(algorithm, state, lambda step: data, key=jr.key(0), steps=steps)
    values = lambda metrics: {k: float(m.value) for k, m in metrics.items()}  # noqa: E731
    return [(float(state.params["w"]), values(metrics)) for _, state, metrics in run]


def test_scaling_saves_gradients_that_would_vanish() -> None:
    """A slope of 1e-8 is nothing in float16."""
    sgd = optax.sgd(1e7)
    plain = descend(half_precision(sgd), 1e-8, 1)
    assert plain[0][0] == 1.0
    scaled = descend(loss_scaled(half_precision, sgd), 1e-8, 1)
    w, metrics = scaled[0]
    assert w == pytest.approx(0.9, rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(1e-8, rel=1e-2)
    assert metrics["skipped"] == 0


def test_scaling_halves_until_the_gradient_is_finite() -> None:
    """A slope of 16 at a scale of 32768 is infinite in float16, and so at 16384, 8192 and 4096."""
    scaled = descend(loss_scaled(half_precision, optax.sgd(1 / 64)), 16.0, 6)
    assert [m["skipped"] for _, m in scaled] == [1, 1, 1, 1, 0, 0]
    assert [w for w, _ in scaled] == pytest.approx([1, 1, 1, 1, 0.75, 0.5])
    assert scaled[4][1]["loss"] == pytest.approx(16.0) and scaled[4][1]["grad_norm"] == 16.0


def test_scaling_doubles_after_a_while() -> None:
    algorithm = loss_scaled(half_precision, optax.sgd(0.0), initial=4.0, period=2, factor=2)
    state = algorithm.init(jr.key(0), {"w": jnp.float32(1)})
    run = train(algorithm, state, lambda step: jnp.ones((1, 2)), key=jr.key(0), steps=5)
    assert [float(s.opt_state.inner.scale) for _, s, _ in run] == [4, 8, 8, 16, 16]
