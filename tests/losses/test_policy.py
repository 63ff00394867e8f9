"""Policy objectives: worked values, a float64 twin, and the gradient at zero change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.losses import (
    check_positive,
    cispo,
    clipped,
    dppo_kl,
    dppo_tv,
    dual_clipped,
    gspo_token,
    reinforce,
    sapo,
    token_mean,
    two_sided,
    vespo,
)
from purepost.losses.policy import log_ratio
from tests.losses import worked

ONE = worked.spans_of([[1]])


PER_TOKEN = [reinforce, clipped, two_sided, dual_clipped, cispo, sapo, dppo_tv, dppo_kl]


def at(x: float):
    return jnp.full((1, 1), x, jnp.float32)


@pytest.mark.parametrize(
    ("advantage", "loss", "gradient"), [(1.0, -1.2, 0.0), (-1.0, np.exp(0.2), np.exp(0.2))]
)
def test_a_ratio_beyond_the_clip(advantage, loss, gradient):
    """log π −1 then −.8: ratio 1.221403."""

    def value(logp):
        return clipped(logp, at(-1.0), at(advantage), ONE)[0].sum()

    got, grad = jax.value_and_grad(value)(at(-0.8))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(grad[0, 0], gradient, rtol=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_change", [-1.0, -0.3, -0.15, 0.0, 0.15, 0.24, 0.3, 1.0])
def test_clipped_twin_with_bounds_apart(advantage, log_change):
    got, metrics = clipped(at(log_change - 2), at(-2.0), at(advantage), ONE, low=0.2, high=0.28)
    r = np.exp(log_change)
    expected = worked.clipped(r, advantage, 0.2, 0.28)
    np.testing.assert_allclose(got[0, 0], expected, rtol=1e-5)
    low, high = r < 0.8 and advantage < 0, r > 1.28 and advantage > 0
    assert bool(metrics["clip_ratio/low_mean"].value) == low
    assert bool(metrics["clip_ratio/high_mean"].value) == high
    assert bool(metrics["clip_ratio/region_mean"].value) == (low or high)


def test_reinforce_is_minus_advantage_times_logp():
    losses, metrics = reinforce(at(-1.5), at(-9.0), at(2.0), ONE)
    np.testing.assert_allclose(losses, [[3.0]])
    assert metrics == {}


def gradient(objective, logps, old, advantages, spans):
    def value(logps):
        return token_mean(objective(logps, old, advantages, spans)[0], spans).value

    return jax.grad(value)(logps)


@given(seed=st.integers(0, 2**32 - 1))
def test_at_zero_change_every_gradient_is_minus_advantage_over_the_weight(seed):
    """Of the sequences' objectives too that keep the tokens apart."""
    rng = np.random.default_rng(seed)
    logps = jnp.asarray(-rng.exponential(size=(3, 5)), jnp.float32)
    advantages = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    mask = rng.random((3, 5)) < 0.7
    spans = worked.spans_of(mask.astype(int).tolist())
    expected = np.where(mask, -np.asarray(advantages) / max(mask.sum(), 1), 0.0)
    for objective in [*PER_TOKEN, gspo_token, vespo]:
        grad = gradient(objective, logps, logps, advantages, spans)
        np.testing.assert_allclose(grad, expected, rtol=1e-5)


@given(seed=st.integers(0, 2**32 - 1), change=st.floats(-0.15, 0.15))
def test_an_inactive_clip_is_the_plain_importance_ratio(seed, change):
    rng = np.random.default_rng(seed)
    old = jnp.asarray(-rng.exponential(size=(2, 4)), jnp.float32)
    advantages = jnp.asarray(rng.normal(size=(2, 4)), jnp.float32)
    spans = worked.spans_of([[1] * 4] * 2)
    logps = old + jnp.asarray(change, jnp.float32)
    losses, metrics = clipped(logps, old, advantages, spans)
    np.testing.assert_allclose(losses, -np.exp(change) * np.asarray(advantages), rtol=1e-5)
    assert metrics["clip_ratio/region_mean"].value == 0


def test_the_log_ratio_is_bounded_before_it_is_exponentiated():
    spans = worked.spans_of([[1, 1]])
    new, old = jnp.asarray([[0.0, -500.0]]), jnp.asarray([[-500.0, 0.0]])
    np.testing.assert_array_equal(log_ratio(new, old, spans), [[20.0, -20.0]])
    losses, _ = clipped(new, old, jnp.asarray([[-1.0, 1.0]]), spans)
    np.testing.assert_allclose(losses, [[np.exp(20), -np.exp(-20)]], rtol=1e-5)


def test_a_masked_minus_infinity_does_not_poison_the_gradient():
    """new [−1, −2], old [−1, −inf], mask [1, 0]: loss −1, gradient [−1, 0]."""
    new, old = jnp.asarray([[-1.0, -2.0]]), jnp.asarray([[-1.0, -np.inf]])
    spans = worked.spans_of([[1, 0]])

    def value(new):
        losses = -jnp.exp(log_ratio(new, old, spans))
        return token_mean(losses, spans).value

    loss, grad = jax.value_and_grad(value)(new)
    np.testing.assert_allclose(loss, -1.0, rtol=1e-6)
    np.testing.assert_allclose(grad, [[-1.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("objective", PER_TOKEN)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_masked_reaches_neither_value_nor_gradient(objective, bad):
    spans = worked.spans_of([[1, 0], [0, 1]])
    fill = lambda x: jnp.where(spans.mask, x, jnp.asarray(bad, jnp.float32))  # noqa: E731
    logps, old = jnp.full((2, 2), -1.0), jnp.full((2, 2), -1.1)
    advantages = jnp.full((2, 2), 0.5)

    def value(logps, old, advantages):
        losses, metrics = objective(logps, old, advantages, spans)
        return token_mean(losses, spans).value, metrics

    clean, g_clean = jax.value_and_grad(value, has_aux=True)(logps, old, advantages)
    dirty, g_dirty = jax.value_and_grad(value, has_aux=True)(fill(logps), fill(old), advantages)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    np.testing.assert_array_equal(g_clean, g_dirty)
    dirty, g_dirty = jax.value_and_grad(value, has_aux=True)(logps, old, fill(advantages))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    np.testing.assert_array_equal(g_clean, g_dirty)


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def kl_of_two(p: float, q: float) -> float:
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def twin(name: str, new: float, old: float, a: float) -> tuple[float, float]:
    """(loss, d loss / d log π) of one token, written from the formulas."""
    p, q = np.exp(new), np.exp(old)
    r = p / q
    up, outside = r > 1.2 and a > 0, r < 0.8 and a < 0
    plain = worked.clipped(r, a, 0.2, 0.2), 0.0 if up or outside else -r * a
    match name:
        case "two_sided":
            return (-4 * a, 0.0) if a < 0 and r > 4 else plain
        case "dual_clipped":
            return (-3 * a, 0.0) if a < 0 and r > 3 else plain
        case "cispo":
            return -min(r, 5) * a * new, -min(r, 5) * a
        case "sapo":
            tau = 1.0 if a > 0 else 1.05
            gate = sigmoid(tau * (r - 1))
            return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * r
        case "dppo_tv":
            keep = p - q <= 0.2 if a > 0 else p - q >= -0.2
        case _:
            near = kl_of_two(q, p) <= 0.2
            keep = near or (p <= q if a > 0 else p >= q)
    return -a * min(r, 3) * new * keep, -a * min(r, 3) * keep


@pytest.mark.parametrize("objective", [two_sided, dual_clipped, cispo, sapo, dppo_tv, dppo_kl])
@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize(
    ("new", "old"),
    [(-2.0, -2.1), (-2.0, -1.5), (-0.2, -1.0), (-1.0, -0.2), (-1.0, -3.0), (-9.0, -0.5)],
)
def test_float64_twins(objective, advantage, new, old):
    def value(logp):
        return objective(logp, at(old), at(advantage), ONE)[0].sum()

    loss, grad = jax.value_and_grad(value)(at(new))
    expected = twin(objective.__name__, new, old, advantage)
    np.testing.assert_allclose((loss, grad[0, 0]), expected, rtol=1e-4, atol=1e-6)


def test_the_metrics_count_what_is_cut():
    spans = worked.spans_of([[1, 1, 1, 0]])
    new, old = jnp.asarray([[0.0, 0.0, 0.0, 0.0]]), jnp.asarray([[-2.0, -2.0, 0.0, -9.0]])
    advantages = jnp.asarray([[1.0, -1.0, 1.0, 1.0]])
    shares = {
        "cispo_clip_ratio": cispo(new, old, advantages, spans)[1],
        "clip_ratio/dual_mean": dual_clipped(new, old, advantages, spans)[1],
        "dppo/dropped_mean": dppo_tv(new, old, advantages, spans)[1],
    }
    for name, metrics in shares.items():
        np.testing.assert_allclose(metrics[name].value, 1 / 3, rtol=1e-6)


def test_limits_must_be_positive_unless_they_are_traced():
    check_positive(low=0.1, high=1, swept=jnp.zeros(()))
    with pytest.raises(ValueError, match="expected 0 < high, got 0"):
        check_positive(low=0.1, high=0)
