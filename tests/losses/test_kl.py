"""KL estimators: worked values, and their true expected gradients in a world of two actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.losses import KL, k2, k3, k3_weighted
from tests.losses import worked

ESTIMATORS: dict[str, KL] = {"k2": k2, "k3": k3, "k3_weighted": k3_weighted}


def pair(a: float, b: float):
    return jnp.asarray([[a, b]], jnp.float32)


@pytest.mark.parametrize(
    ("name", "value"), [("k2", 0.125), ("k3", 0.106531), ("k3_weighted", 0.106531)]
)
def test_values(name, value):
    """log π −1, reference −1.5: d = .5."""
    spans = worked.spans_of([[1, 1]])
    logps, ref = pair(-1.0, -1.0), pair(-1.5, -1.0)
    got = ESTIMATORS[name](logps, logps, ref, spans)
    np.testing.assert_allclose(got, [[value, 0.0]], rtol=1e-5)


def test_k3_weighted_is_k3_times_the_ratio():
    spans = worked.spans_of([[1, 1]])
    logps, old, ref = pair(-1.0, -0.5), pair(-1.2, -0.1), pair(-1.5, -2.0)
    ratio = np.exp([[0.2, -0.4]])
    expected = ratio * np.asarray(k3(logps, old, ref, spans))
    np.testing.assert_allclose(k3_weighted(logps, old, ref, spans), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"), [("k2", 0.221807), ("k3_weighted", 0.221807), ("k3", 0.3)]
)
def test_expected_gradient_on_policy(name, expected):
    """Policy (.8, .2), reference (.5, .5), by exact enumeration: each action's estimate weighed
    by its probability, which is held constant as sampling holds it.
    """
    spans = worked.spans_of([[1, 1]])
    ref, start = jnp.log(pair(0.5, 0.5)), jnp.log(pair(0.8, 0.2))

    def loss(logits):
        logps = jax.nn.log_softmax(logits)
        old = jax.lax.stop_gradient(logps)
        return (jnp.exp(old) * ESTIMATORS[name](logps, old, ref, spans)).sum()

    np.testing.assert_allclose(jax.grad(loss)(start)[0, 0], expected, rtol=1e-5)


def test_the_true_gradients_that_these_are_compared_with():
    """Reverse KL(π‖π_ref) .221807 and forward KL(π_ref‖π) .3, in float64 by hand."""
    p, q = np.array([0.8, 0.2]), np.array([0.5, 0.5])
    d = np.log(p / q)
    reverse = p[0] * (d[0] - (p * d).sum())
    forward = p[0] - q[0]
    np.testing.assert_allclose([reverse, forward], [0.221807, 0.3], atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_difference_is_no_divergence(name):
    spans = worked.spans_of([[1, 1]])
    logps = pair(-1.3, -0.2)
    np.testing.assert_array_equal(ESTIMATORS[name](logps, logps, logps, spans), [[0.0, 0.0]])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_masked_reaches_neither_value_nor_gradient(name, bad):
    spans = worked.spans_of([[1, 0]])

    def value(logps, ref):
        return jnp.where(spans.mask, ESTIMATORS[name](logps, logps, ref, spans), 0.0).sum()

    both = jax.value_and_grad(value, argnums=(0, 1))
    clean = both(pair(-1.0, -2.0), pair(-1.5, -2.0))
    dirty = both(pair(-1.0, bad), pair(-1.5, bad))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
