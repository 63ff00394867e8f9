"""Policy-gradient objectives, per token, to be minimised.

Each takes (logps, old_logps, advantages, spans) and gives (losses, metrics). Log-probabilities in
nats; masked inputs are put aside before anything is exponentiated. At zero policy change every
gradient is −A ∇log π.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..mean import Metrics, Spans, masked_mean, select
from ..types import Scalar

Objective = Callable[
    [Float[Array, "b t"], Float[Array, "b t"], Float[Array, "b t"], Spans],
    tuple[Float[Array, "b t"], Metrics],
]

MAX_LOG_RATIO = 20.0  # nats: beyond it e^x says nothing and soon overflows


def log_ratio(
    logps: Float[Array, "b t"], old_logps: Float[Array, "b t"], spans: Spans
) -> Float[Array, "b t"]:
    """log π − log π_old of the trained tokens, within ±20; 0 elsewhere."""
    new, old = select(spans.mask, logps), select(spans.mask, old_logps)
    return jnp.clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)


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
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    too_low = ((ratio < 1 - low) & (advantages < 0)).astype(jnp.float32)
    too_high = ((ratio > 1 + high) & (advantages > 0)).astype(jnp.float32)
    return losses, {
        "clip_ratio/low_mean": masked_mean(too_low, spans.mask),
        "clip_ratio/high_mean": masked_mean(too_high, spans.mask),
        "clip_ratio/region_mean": masked_mean(too_low + too_high, spans.mask),
    }
