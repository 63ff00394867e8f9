"""Objectives over sequences: worked values, float64 twins, gradients at zero change, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.losses import (
    gmpo,
    gspo,
    gspo_token,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    vespo,
)
from purepost.mean import Spans
from tests.losses import worked

EVERY = [gspo, gspo_token, gmpo, vespo]
WIDE = {"low": 0.5, "high": 0.5}
SPANS = worked.spans_of([[1, 1, 0, 0], [1, 1, 1, 1]])
LOG_RATIOS = np.asarray([[0.2, 0, 9, 9], [0.1, -0.1, 0.3, 0.1]])
ADVANTAGES = jnp.asarray([[1.0] * 4, [-1.0] * 4])


def loss_of(objective, logps, old, advantages, spans, aggregate=sequence_mean, **limits):
    return aggregate(objective(logps, old, advantages, spans, **limits)[0], spans).value


def test_gspo_ratios_and_their_gradients():
    """Log-ratios [.2, 0] and [.1, −.1, .3, .1], A = ±1, no clipping: both ratios e^.1, loss 0."""
    logps = jnp.asarray(LOG_RATIOS, jnp.float32)

    def value(logps):
        return loss_of(gspo, logps, jnp.zeros((2, 4)), ADVANTAGES, SPANS, **WIDE)

    losses, _ = gspo(logps, jnp.zeros((2, 4)), ADVANTAGES, SPANS, **WIDE)
    np.testing.assert_allclose(losses[:, 0], [-1.105171, 1.105171], rtol=1e-6)
    loss, grad = jax.value_and_grad(value)(logps)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    expected = np.asarray([[-0.552585] * 2 + [0, 0], [0.276293] * 4]) / 2
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)


def test_gspo_token_has_the_value_and_gradient_of_gspo():
    old = jnp.zeros((2, 4))
    for limits in (WIDE, {"low": 0.05, "high": 0.05}):
        both = [
            jax.value_and_grad(
                lambda x, f=f, limits=limits: loss_of(f, x, old, ADVANTAGES, SPANS, **limits)
            )(jnp.asarray(LOG_RATIOS, jnp.float32))
            for f in (gspo, gspo_token)
        ]
        np.testing.assert_allclose(both[0][0], both[1][0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(both[0][1], both[1][1], rtol=1e-5, atol=1e-7)


def twin(name: str, log_ratios: np.ndarray, logps: np.ndarray, a: float) -> tuple:
    """(the loss at each token, the gradient of their sum by each log-ratio), in float64."""
    lr, n = np.asarray(log_ratios), len(log_ratios)
    if name == "vespo":
        k, rate = (2, 3) if a >= 0 else (3, 2)
        w = np.exp(np.clip(lr.sum(), np.log(1e-8), 20))
        weight = w**k * np.exp(rate * (1 - w))
        return -a * weight * np.asarray(logps), np.full(n, -a * weight)
    if name == "gmpo":
        bounded = np.minimum(lr, 0.4) if a > 0 else np.maximum(lr, -0.4)
        mean = np.exp(bounded.mean())
        return np.full(n, -a * mean), np.where(bounded == lr, -a * mean, 0)
    s = np.exp(lr.mean())
    cut = s > 1 + 4e-4 if a > 0 else s < 1 - 3e-4
    return np.full(n, worked.clipped(s, a, 3e-4, 4e-4)), np.full(n, 0.0 if cut else -a * s)


@pytest.mark.parametrize("objective", EVERY)
@given(seed=st.integers(0, 2**32 - 1))
def test_float64_twins(objective, seed):
    rng = np.random.default_rng(seed)
    mask, episode = rng.random((2, 8)) < 0.8, np.repeat([[0] * 4 + [1] * 4], 2, 0)
    logps, old = -rng.exponential(size=(2, 2, 8)) * [[[1.0]], [[0.5]]]
    per_episode = rng.normal(size=(2, 2))
    advantages = np.take_along_axis(per_episode, episode, 1)
    spans = Spans(jnp.asarray(mask), jnp.asarray(episode, jnp.int32), jnp.ones((2, 2)))
    as_float = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731

    def value(logps):
        losses, _ = objective(logps, as_float(old), as_float(advantages), spans)
        return jnp.where(spans.mask, losses, 0).sum(), losses

    grad, losses = jax.grad(value, has_aux=True)(as_float(logps))
    for i, j in np.ndindex(2, 2):
        mine = mask[i] & (episode[i] == j)
        if not mine.any():
            continue
        expected, gradient = twin(
            objective.__name__, (logps - old)[i, mine], logps[i, mine], float(per_episode[i, j])
        )
        np.testing.assert_allclose(losses[i, mine], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(grad[i, mine], gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(grad)[~mask], 0)


def test_at_zero_change_they_are_minus_advantage_under_the_sequence_mean():
    """LUSPO, which is GSPO's sum, under the sum over sequences."""
    logps = jnp.asarray(-1.0 - LOG_RATIOS, jnp.float32)
    mask, lengths = np.asarray(SPANS.mask), np.asarray([[2.0], [4.0]])
    expected = np.where(mask, -np.asarray(ADVANTAGES) / lengths / 2, 0)
    for objective in EVERY:
        grad = jax.grad(lambda x, f=objective: loss_of(f, x, logps, ADVANTAGES, SPANS))(logps)
        np.testing.assert_allclose(grad, expected, rtol=1e-5)
    grad = jax.grad(lambda x: loss_of(gspo, x, logps, ADVANTAGES, SPANS, sequence_sum))(logps)
    np.testing.assert_allclose(grad, expected * lengths, rtol=1e-5)


@pytest.mark.parametrize("objective", EVERY)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_masked_reaches_neither_value_nor_gradient(objective, bad):
    spans = worked.spans_of([[1, 0], [0, 1], [0, 0]])
    fill = lambda x: jnp.where(spans.mask, x, jnp.asarray(bad, jnp.float32))  # noqa: E731
    logps, old, advantages = (jnp.full((3, 2), x) for x in (-1.0, -1.1, 0.5))

    def value(logps, old, advantages):
        losses, metrics = objective(logps, old, advantages, spans)
        return token_mean(losses, spans).value, metrics

    run = jax.value_and_grad(value, has_aux=True)
    clean = run(logps, old, advantages)
    dirty = run(fill(logps), fill(old), fill(advantages))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_far_sequences_stay_finite():
    """A thousand nats away, at both ends."""
    spans = worked.spans_of([[1] * 50] * 2)
    logps = jnp.stack([jnp.zeros(50), jnp.full(50, -40.0)])
    for objective in EVERY:
        for advantage in (1.0, -1.0):
            losses, _ = objective(logps, logps[::-1], jnp.full((2, 50), advantage), spans)
            assert np.isfinite(losses).all()


def test_every_prompt_counts_the_same_under_the_prompt_mean():
    """Tokens of 1 and 1; of 3, 3, 3 and 6; and a filler row."""
    spans = worked.spans_of([[1, 1, 0, 0], [1] * 4, [0] * 4], weights=[1, 1, 0])
    losses = jnp.asarray([[1, 1, 9, 9], [3, 3, 3, 6], [9] * 4], jnp.float32)
    np.testing.assert_allclose(prompt_mean(losses, spans).value, (1 + 3.75) / 2)
