"""The value loss of PPO: worked values, a float64 twin, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.losses import clipped_value, token_mean
from tests.losses import worked


def test_a_value_beyond_the_clip():
    """V_old 0, return 1: at V = .5 the clipped .2 is worse, and gives no gradient."""
    spans = worked.spans_of([[1, 1]])
    zero, one = jnp.zeros((1, 2)), jnp.ones((1, 2))

    def value(v):
        losses, metrics = clipped_value(v, zero, one, spans)
        return losses.sum(), (losses, metrics)

    grad, (losses, metrics) = jax.grad(value, has_aux=True)(jnp.asarray([[0.5, 0.1]]))
    np.testing.assert_allclose(losses, [[0.32, 0.405]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, -0.9]], rtol=1e-6)
    np.testing.assert_allclose(metrics["value/clip_ratio"].value, 0.5)


@given(seed=st.integers(0, 2**32 - 1))
def test_float64_twin(seed):
    v, old, r = np.random.default_rng(seed).normal(size=(3, 2, 3))
    expected = np.maximum((v - r) ** 2, (np.clip(v, old - 0.2, old + 0.2) - r) ** 2) / 2
    as_float = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    spans = worked.spans_of([[1] * 3] * 2)
    losses, _ = clipped_value(as_float(v), as_float(old), as_float(r), spans)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_values_reach_nothing(bad):
    spans = worked.spans_of([[1, 0]])
    v, old, r = jnp.asarray([[[0.5, bad]], [[0.0, bad]], [[1.0, bad]]])

    def value(v):
        return token_mean(clipped_value(v, old, r, spans)[0], spans).value

    loss, grad = jax.value_and_grad(value)(v)
    np.testing.assert_allclose(loss, 0.32, rtol=1e-6)
    np.testing.assert_array_equal(grad, [[0, 0]])
