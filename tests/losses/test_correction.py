"""Corrections for a sampler that is not the trainer: worked values, masks, no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.losses import clipped, geometric, icepop, mis, off_policy_sequences, tis
from purepost.losses.correction import clamped, importance, sequence_total, zero_outside
from tests.losses import worked

# w = [.25, 1, 8] and [2, 1.5, –]: products 2 and 3, geometric means 1.26 and 1.73.
SPANS = worked.spans_of([[1, 1, 1], [1, 1, 0]])
LOG_W = jnp.log(jnp.asarray([[0.25, 1, 8], [2, 1.5, 99]]))
ZERO, ONE = jnp.zeros((2, 3)), jnp.ones((2, 3))


def weights(correction, log_w=LOG_W, advantages=ONE):
    return correction(ZERO, log_w, ZERO, advantages, SPANS)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (tis(), [[0.25, 1, 2], [2, 1.5, 0]]),
        (icepop(), [[0, 1, 0], [2, 1.5, 0]]),
        (mis(2.5), [[2, 2, 2], [0, 0, 0]]),
        (geometric(0.5, 1.5), [[2 ** (1 / 3)] * 3, [0, 0, 0]]),
        (importance(sequence_total, clamped(0, 2.5)), [[2, 2, 2], [2.5, 2.5, 0]]),
    ],
)
def test_weights(correction, expected):
    got, metrics = weights(correction)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    trained = np.asarray(expected)[np.asarray(SPANS.mask)]
    np.testing.assert_allclose(metrics["sampling/frac_zeroed"].value, (trained == 0).mean())


def test_metrics_are_of_the_untreated_weights():
    _, metrics = weights(tis())
    name = "sampling/importance_sampling_ratio/"
    np.testing.assert_allclose(metrics[name + "mean"].value, 12.75 / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics[name + "min"].value, (0.25 + 1.5) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics[name + "max"].value, (8 + 2) / 2, rtol=1e-6)


def test_sequences_that_the_policy_has_left_go_if_they_are_bad():
    """mean(log π_sampler − log π): −.23 and 1 here, for A = −1, and the same for A = 1."""
    logps = jnp.asarray([[0.0, 0.0, 0.7], [-1.0, -1.0, np.nan]])
    for sign, expected in ((-1.0, [[1, 1, 1], [0, 0, 0]]), (1.0, [[1, 1, 1], [1, 1, 0]])):
        got, metrics = off_policy_sequences(0.1)(logps, ZERO, ZERO, sign * ONE, SPANS)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(metrics["sampling/frac_zeroed"].value, 0.4 * (sign < 0))


@pytest.mark.parametrize("correction", [tis(), icepop(), mis(), geometric()])
def test_the_samplers_own_probabilities_need_no_correction(correction):
    got, _ = weights(correction, ZERO)
    np.testing.assert_array_equal(got, np.asarray(SPANS.mask, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("correction", [tis(), mis(), geometric(), off_policy_sequences()])
def test_masked_values_reach_nothing(correction, bad):
    dirty = jnp.where(SPANS.mask, LOG_W, bad)
    got = correction(dirty, dirty, jnp.where(SPANS.mask, ZERO, bad), ONE, SPANS)
    jax.tree.map(np.testing.assert_array_equal, got, correction(LOG_W, LOG_W, ZERO, ONE, SPANS))


def test_weights_stay_finite_and_carry_no_gradient():
    far = jnp.full((2, 3), 1000.0)
    got, metrics = weights(importance(sequence_total, clamped(0, 2)), far)
    assert np.isfinite(got).all() and all(np.isfinite(m.value) for m in metrics.values())
    for correction in (tis(), off_policy_sequences()):
        grad = jax.grad(lambda x, f=correction: f(x, x, ZERO, -ONE, SPANS)[0].sum())(LOG_W)
        np.testing.assert_array_equal(grad, 0)


def test_decoupled_ppo_is_the_clipped_loss_times_the_truncated_weight():
    """−min(rA, clip(r)A)·min(π_prox/π_behaviour, cap), r = π/π_prox, in float64."""
    rng = np.random.default_rng(0)
    new, prox, behaviour = -rng.exponential(size=(3, 2, 3))
    a = rng.normal(size=(2, 3))
    as_float = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    losses, _ = clipped(as_float(new), as_float(prox), as_float(a), SPANS)
    w, _ = tis(high=1.5)(as_float(new), as_float(prox), as_float(behaviour), as_float(a), SPANS)
    for i, t in zip(*np.nonzero(np.asarray(SPANS.mask)), strict=True):
        loss = worked.clipped(float(np.exp(new - prox)[i, t]), float(a[i, t]), 0.2, 0.2)
        expected = loss * min(np.exp(prox - behaviour)[i, t], 1.5)
        np.testing.assert_allclose((losses * w)[i, t], expected, rtol=1e-5)


@pytest.mark.parametrize("limits", [(-1, 2), (3, 2)])
def test_limits_are_of_a_ratio(limits):
    for treatment in (clamped, zero_outside):
        with pytest.raises(ValueError, match="0 ≤ low ≤ high of a ratio"):
            treatment(*limits)
