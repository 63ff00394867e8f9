"""Policy-gradient objectives over whole sequences, in the form of the per-token ones.

A sequence's loss stands at each of its trained tokens, so that `sequence_mean` gives its mean over
sequences. Log-probabilities in nats; the advantage of an episode is the same at all its tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..mean import Metrics, Spans, select
from ..types import Scalar
from .policy import MAX_LOG_RATIO, check_positive, clip_metrics, log_ratio

MAX_TOKEN_RATIO = 10.0  # nats
LEAST_WEIGHT = 1e-8


def _mean_log_ratio(
    logps: Float[Array, "b t"], old_logps: Float[Array, "b t"], spans: Spans
) -> Float[Array, "b t"]:
    """Σ_t (log π − log π_old) / T of every trained token's sequence."""
    total = spans.sum(log_ratio(logps, old_logps, spans))
    return spans.spread(total / jnp.maximum(spans.lengths, 1.0))


def gspo(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 3e-4,
    high: Scalar = 4e-4,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−min(s A, clip(s, 1 − low, 1 + high) A), s = (π(y)/π_old(y))^(1/T).

    Source: Zheng et al., GSPO, 2507.18071, eq. 5.
    """
    check_positive(low=low, high=high)
    ratio = jnp.exp(_mean_log_ratio(logps, old_logps, spans))
    losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return losses, clip_metrics(ratio, advantages, spans, low, high)


def gspo_token(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 3e-4,
    high: Scalar = 4e-4,
) -> tuple[Float[Array, "b t"], Metrics]:
    """The clipped loss of s_t = sg(s)·π/sg(π): GSPO's ratio, with an advantage for each token.

    Source: Zheng et al., GSPO, 2507.18071, §4.3.
    """
    check_positive(low=low, high=high)
    new = select(spans.mask, logps)
    whole = jax.lax.stop_gradient(_mean_log_ratio(logps, old_logps, spans))
    log_s = jnp.minimum(new - jax.lax.stop_gradient(new) + whole, MAX_TOKEN_RATIO)
    ratio = jnp.exp(log_s)
    losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return losses, clip_metrics(ratio, advantages, spans, low, high)


def gmpo(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.4,
    high: Scalar = 0.4,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−A exp(mean_t lr'), lr' the log-ratio of each token clipped on the side that A pushes to.

    Source: Zhao et al., Geometric-Mean Policy Optimization, 2507.20673. `low` and `high`
    bound log-ratios, nats.
    """
    check_positive(low=low, high=high)
    lr = log_ratio(logps, old_logps, spans)
    inside = jnp.clip(lr, -low, high)
    bounded = jnp.where(advantages > 0, jnp.minimum(lr, inside), jnp.maximum(lr, inside))
    mean = spans.spread(spans.sum(bounded) / jnp.maximum(spans.lengths, 1.0))
    metrics = clip_metrics(jnp.exp(lr), advantages, spans, 1 - jnp.exp(-low), jnp.exp(high) - 1)
    return -advantages * jnp.exp(mean), metrics


def vespo(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    positive: tuple[Scalar, Scalar] = (2.0, 3.0),
    negative: tuple[Scalar, Scalar] = (3.0, 2.0),
) -> tuple[Float[Array, "b t"], Metrics]:
    """−sg(φ) A log π, φ = exp(λ)·w^k·exp(−λ w) of the sequence's weight w = π(y)/π_old(y).

    φ is 1 at w = 1 and falls off smoothly. (k, λ) is `positive` where A ≥ 0, else `negative`.
    Source: Shen et al., VESPO, 2602.10693, eq. 20.
    """
    for k, rate in (positive, negative):
        check_positive(k=k, rate=rate)
    total = spans.sum(log_ratio(logps, old_logps, spans))
    log_w = spans.spread(jnp.clip(total, jnp.log(LEAST_WEIGHT), MAX_LOG_RATIO))
    k = jnp.where(advantages >= 0, positive[0], negative[0])
    rate = jnp.where(advantages >= 0, positive[1], negative[1])
    phi = jnp.exp(rate + k * log_w - rate * jnp.exp(log_w))
    losses = -jax.lax.stop_gradient(phi) * advantages * select(spans.mask, logps)
    return losses, {}
