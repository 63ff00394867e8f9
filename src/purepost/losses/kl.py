"""Per-token estimators of KL(π‖π_ref) as losses, d = log π − log π_ref, in nats.

As a loss an estimator is judged by its expected on-policy gradient, not by its expectation. k1 =
d has the right expectation and the gradient 0: as a loss it does nothing, so it is not here.
Source of the estimators: Schulman, Approximating KL divergence, 2020.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..mean import Spans, select
from .policy import log_ratio

# (logps, old_logps, ref_logps, spans) → per-token estimates
KL = Callable[
    [Float[Array, "b t"], Float[Array, "b t"], Float[Array, "b t"], Spans], Float[Array, "b t"]
]


def k2(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    ref_logps: Float[Array, "b t"],
    spans: Spans,
) -> Float[Array, "b t"]:
    """d²/2: the gradient of the reverse KL(π‖π_ref), biased in value."""
    d = select(spans.mask, logps) - select(spans.mask, ref_logps)
    return d * d / 2


def k3(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    ref_logps: Float[Array, "b t"],
    spans: Spans,
) -> Float[Array, "b t"]:
    """e^{−d} + d − 1: unbiased in value, but the gradient is that of the forward KL(π_ref‖π)."""
    d = log_ratio(logps, ref_logps, spans)
    return jnp.expm1(-d) + d


def k3_weighted(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    ref_logps: Float[Array, "b t"],
    spans: Spans,
) -> Float[Array, "b t"]:
    """(π/π_old)·(e^{−d} + d − 1): unbiased in value and in the gradient of the reverse
    KL(π‖π_ref).
    """
    ratio = jnp.exp(log_ratio(logps, old_logps, spans))
    return ratio * k3(logps, old_logps, ref_logps, spans)
