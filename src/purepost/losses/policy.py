"""Policy-gradient objectives, per token, to be minimised.

Each takes (logps, old_logps, advantages, spans) and gives (losses, metrics). Log-probabilities in
nats; masked inputs are put aside before anything is exponentiated. At zero policy change every
gradient is −A ∇log π. Factories hand them over with `functools.partial` where limits differ; limits
out of range raise where the factory builds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..mean import Metrics, Spans, masked_mean, select
from ..types import Scalar
from .limits import expect

Objective = Callable[
    [Float[Array, "b t"], Float[Array, "b t"], Float[Array, "b t"], Spans],
    tuple[Float[Array, "b t"], Metrics],
]

MAX_LOG_RATIO = 20.0  # nats: beyond it e^x says nothing and soon overflows


def check_positive(**values: Scalar) -> None:
    """Raise ValueError unless the numbers among the values are positive; arrays may be traced."""
    for name, value in values.items():
        expect(name, value, 0.0)


def check_objective(objective: Objective) -> None:
    """Let an objective, which checks its limits where it is called, raise what it has to."""
    one = jnp.zeros((1, 1))
    spans = Spans(jnp.ones((1, 1), bool), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    jax.eval_shape(objective, one, one, one, spans)


def log_ratio(
    logps: Float[Array, "b t"], old_logps: Float[Array, "b t"], spans: Spans
) -> Float[Array, "b t"]:
    """log π − log π_old of the trained tokens, within ±20; 0 elsewhere."""
    new, old = select(spans.mask, logps), select(spans.mask, old_logps)
    return jnp.clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_metrics(
    ratio: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    low: Scalar,
    high: Scalar,
) -> Metrics:
    """The shares of trained tokens whose gradient the limits 1 − low and 1 + high cut off."""
    too_low = ((ratio < 1 - low) & (advantages < 0)).astype(jnp.float32)
    too_high = ((ratio > 1 + high) & (advantages > 0)).astype(jnp.float32)
    return {
        "clip_ratio/low_mean": masked_mean(too_low, spans.mask),
        "clip_ratio/high_mean": masked_mean(too_high, spans.mask),
        "clip_ratio/region_mean": masked_mean(too_low + too_high, spans.mask),
    }


def reinforce(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−A log π. Source: Williams, Simple statistical gradient-following algorithms, 1992, eq. 3."""
    return -advantages * select(spans.mask, logps), {}


def clipped(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−min(r A, clip(r, 1 − low, 1 + high) A), r = π/π_old.

    Source: Schulman et al., PPO, 1707.06347, eq. 7. A higher `high` than `low` is DAPO's
    clip-higher, 2503.14476, eq. 8.
    """
    check_positive(low=low, high=high)
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return losses, clip_metrics(ratio, advantages, spans, low, high)


def two_sided(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    ceiling: Scalar = 4.0,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−min(min(r, ceiling) A, clip(r, 1 − low, 1 + high) A): a bad token's loss is bounded too.

    Source: Prime Intellect, INTELLECT-2, 2505.07291. `ceiling` is above 1 + high.
    """
    check_positive(low=low, high=high)
    expect("ceiling", ceiling, 1.0)
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    first = jnp.minimum(ratio, ceiling) * advantages
    losses = -jnp.minimum(first, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return losses, clip_metrics(ratio, advantages, spans, low, high)


def dual_clipped(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    bound: Scalar = 3.0,
) -> tuple[Float[Array, "b t"], Metrics]:
    """The clipped loss, and for A < 0 at most −bound·A.

    Source: Ye et al., Mastering complex control in MOBA games, 1912.09729.
    """
    expect("bound", bound, 1.0)
    losses, metrics = clipped(logps, old_logps, advantages, spans, low=low, high=high)
    bounded = jnp.minimum(losses, -bound * advantages)
    cut = ((bounded < losses) & (advantages < 0)).astype(jnp.float32)
    metrics["clip_ratio/dual_mean"] = masked_mean(cut, spans.mask)
    return jnp.where(advantages < 0, bounded, losses), metrics


def cispo(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.0,
    high: Scalar = 5.0,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−sg(clip(r, low, high)) A log π: the weight is clipped, no token's gradient is lost.

    Source: MiniMax-M1, 2506.13585, eq. 4. Both limits are of the ratio itself.
    """
    expect("low", low, 0.0, or_low=True)
    check_positive(high=high)
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    cut = ((ratio > high) & (advantages > 0)).astype(jnp.float32)
    losses = -weight * advantages * select(spans.mask, logps)
    return losses, {"cispo_clip_ratio": masked_mean(cut, spans.mask)}


def sapo(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    positive: Scalar = 1.0,
    negative: Scalar = 1.05,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−A·σ(τ(r − 1))·4/τ, τ = positive where A > 0, else negative: a soft gate for the clip.

    Source: Gao et al., Soft Adaptive Policy Optimization, 2511.20347, eq. 5.
    """
    check_positive(positive=positive, negative=negative)
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    tau = jnp.where(advantages > 0, positive, negative)
    return -advantages * jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau, {}


def _divergence_masked(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    keep: Bool[Array, "b t"],
    cap: Scalar,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−A·sg(min(r, cap))·log π where `keep` holds, 0 elsewhere."""
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    weight = jax.lax.stop_gradient(jnp.where(keep, jnp.minimum(ratio, cap), 0.0))
    dropped = 1.0 - keep.astype(jnp.float32)
    losses = -advantages * weight * select(spans.mask, logps)
    return losses, {"dppo/dropped_mean": masked_mean(dropped, spans.mask)}


def dppo_tv(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    cap: Scalar = 3.0,
) -> tuple[Float[Array, "b t"], Metrics]:
    """−A·sg(min(r, cap))·log π, without tokens whose probability has moved too far: A > 0 by more
    than `high` up, else by more than `low` down.

    Source: Qi et al., Rethinking the trust region in LLM RL, 2602.04879.
    """
    check_positive(low=low, high=high, cap=cap)
    new, old = jnp.exp(select(spans.mask, logps)), jnp.exp(select(spans.mask, old_logps))
    keep = jnp.where(advantages > 0, new - old <= high, new - old >= -low)
    return _divergence_masked(logps, old_logps, advantages, spans, keep, cap)


def dppo_kl(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    spans: Spans,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    cap: Scalar = 3.0,
) -> tuple[Float[Array, "b t"], Metrics]:
    """As `dppo_tv`, by the KL between the two-way choices “this token or another”, nats.

    Source: Qi et al., Rethinking the trust region in LLM RL, 2602.04879.
    """
    check_positive(low=low, high=high, cap=cap)
    log_new, log_old = select(spans.mask, logps), select(spans.mask, old_logps)
    new, old = jnp.exp(log_new), jnp.exp(log_old)
    others = jnp.log((1 - old + 1e-8) / (1 - new + 1e-8))
    kl = old * (log_old - log_new) + (1 - old) * others
    up, down = (kl <= high) | (new <= old), (kl <= low) | (new >= old)
    keep = jnp.where(advantages > 0, up, down)
    return _divergence_masked(logps, old_logps, advantages, spans, keep, cap)
