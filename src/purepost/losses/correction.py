"""Corrections for a sampler whose probabilities are not the trainer's, w = π_old/π_sampler.

Two independent choices: the level at which log w is taken, and what is done to a w that is too far
from 1. Each gives weights that multiply the per-token losses and carry no gradient. With the ratio
π/π_old in the objective, `tis` makes decoupled PPO's loss of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..mean import Mean, Metrics, Spans, masked_mean, select
from ..types import Scalar
from .policy import MAX_LOG_RATIO, log_ratio

Level = Callable[[Float[Array, "b t"], Spans], Float[Array, "b t"]]
Treatment = Callable[[Float[Array, "b t"]], Float[Array, "b t"]]
# (logps, old_logps, sampler_logps, advantages, spans) → (weights, metrics)
Correction = Callable[
    [
        Float[Array, "b t"],
        Float[Array, "b t"],
        Float[Array, "b t"],
        Float[Array, "b t"],
        Spans,
    ],
    tuple[Float[Array, "b t"], Metrics],
]


def token_level(log_w: Float[Array, "b t"], spans: Spans) -> Float[Array, "b t"]:
    """Every token's own log w."""
    return log_w


def sequence_total(log_w: Float[Array, "b t"], spans: Spans) -> Float[Array, "b t"]:
    """Σ_t log w of the token's sequence: the whole sequence's weight."""
    return spans.spread(spans.sum(log_w))


def sequence_average(log_w: Float[Array, "b t"], spans: Spans) -> Float[Array, "b t"]:
    """Σ_t log w / T of the token's sequence: a geometric mean."""
    return spans.spread(spans.sum(log_w) / jnp.maximum(spans.lengths, 1.0))


def clamped(low: Scalar, high: Scalar) -> Treatment:
    """w within [low, high]."""
    _check_limits(low, high)
    return lambda w: jnp.clip(w, low, high)


def zero_outside(low: Scalar, high: Scalar) -> Treatment:
    """w where it lies in [low, high], else 0."""
    _check_limits(low, high)
    return lambda w: jnp.where((w >= low) & (w <= high), w, 0.0)


def importance(level: Level, treatment: Treatment) -> Correction:
    """The correction of a level and a treatment.

    The least and the greatest w are logged as means over rows, which splits of a batch leave as
    they are.
    """

    def correct(
        logps: Float[Array, "b t"],
        old_logps: Float[Array, "b t"],
        sampler_logps: Float[Array, "b t"],
        advantages: Float[Array, "b t"],
        spans: Spans,
    ) -> tuple[Float[Array, "b t"], Metrics]:
        log_w = level(log_ratio(old_logps, sampler_logps, spans), spans)
        raw = jnp.exp(jnp.clip(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        weights = select(spans.mask, treatment(raw))
        raw, weights = jax.lax.stop_gradient((raw, weights))
        return weights, {
            "sampling/importance_sampling_ratio/min": _lowest_of_rows(raw, spans),
            "sampling/importance_sampling_ratio/mean": masked_mean(raw, spans.mask),
            "sampling/importance_sampling_ratio/max": _highest_of_rows(raw, spans),
            "sampling/frac_zeroed": masked_mean((weights == 0).astype(jnp.float32), spans.mask),
        }

    return correct


def sampler_gap(
    logps: Float[Array, "b t"], sampler_logps: Float[Array, "b t"], spans: Spans
) -> Metrics:
    """|log π − log π_sampler|, nats: its mean, and its greatest as a mean over rows."""
    gap = jnp.abs(select(spans.mask, logps) - select(spans.mask, sampler_logps))
    return {
        "sampling/sampling_logp_difference/mean": masked_mean(gap, spans.mask),
        "sampling/sampling_logp_difference/max": _highest_of_rows(gap, spans),
    }


def _highest_of_rows(x: Float[Array, "b t"], spans: Spans) -> Mean:
    """Each row's highest x over its trained tokens, as a mean over the rows that have some."""
    some = spans.mask.any(1)
    return masked_mean(jnp.where(spans.mask, x, -jnp.inf).max(1), some)


def _lowest_of_rows(x: Float[Array, "b t"], spans: Spans) -> Mean:
    """Each row's lowest x over its trained tokens, as a mean over the rows that have some."""
    some = spans.mask.any(1)
    return masked_mean(jnp.where(spans.mask, x, jnp.inf).min(1), some)


def tis(low: Scalar = 0.0, high: Scalar = 2.0) -> Correction:
    """Truncated importance sampling: tokens, clamped. Source: Yao et al., Your efficient RL
    framework secretly brings you off-policy RL training, 2025.
    """
    return importance(token_level, clamped(low, high))


def icepop(low: Scalar = 0.5, high: Scalar = 5.0) -> Correction:
    """Tokens, zero outside. Source: Ling team, Every step evolves, 2510.18855."""
    return importance(token_level, zero_outside(low, high))


def mis(high: Scalar = 3.0) -> Correction:
    """Masked importance sampling: whole sequences, zero above `high`. Source: Liu et al., When
    speed kills stability, 2025.
    """
    return importance(sequence_total, zero_outside(0.0, high))


def geometric(low: Scalar = 0.999, high: Scalar = 1.002) -> Correction:
    """The geometric mean of a sequence's weights, zero outside: masks as `mis`, whatever the
    length.
    """
    return importance(sequence_average, zero_outside(low, high))


def off_policy_sequences(delta: Scalar = 1e-4) -> Correction:
    """1, and 0 for a sequence of negative advantage that the policy has left by more than `delta`:
    keep iff A ≥ 0 or mean_t(log π_sampler − log π) ≤ delta, nats per token.

    Source: DeepSeek-AI, DeepSeek-V3.2, 2512.02556, §3.1.
    """

    def correct(
        logps: Float[Array, "b t"],
        old_logps: Float[Array, "b t"],
        sampler_logps: Float[Array, "b t"],
        advantages: Float[Array, "b t"],
        spans: Spans,
    ) -> tuple[Float[Array, "b t"], Metrics]:
        gap = sequence_average(log_ratio(sampler_logps, logps, spans), spans)
        keep = ((advantages >= 0) | (gap <= delta)).astype(jnp.float32)
        metrics = {"sampling/frac_zeroed": masked_mean(1.0 - keep, spans.mask)}
        return jax.lax.stop_gradient(select(spans.mask, keep)), metrics

    return correct


def _check_limits(low: Scalar, high: Scalar) -> None:
    numbers = not (isinstance(low, jax.Array) or isinstance(high, jax.Array))
    if numbers and not 0 <= low <= high:
        raise ValueError(f"expected limits 0 ≤ low ≤ high of a ratio, got {low} and {high}")
