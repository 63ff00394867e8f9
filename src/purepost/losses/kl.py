"""Per-token estimators of KL(π‖π_ref) as losses, d = log π − log π_ref, in nats.

As a loss an estimator is judged by its expected on-policy gradient, not by its expectation. k1 has
the right expectation and the gradient 0: as a loss it does nothing, and factories refuse it; in a
reward (`ppo`, `reinforce_pp`) it is the one to use.
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


def k1(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    ref_logps: Float[Array, "b t"],
    spans: Spans,
) -> Float[Array, "b t"]:
    """d: unbiased in value; its expected gradient on-policy is 0."""
    return select(spans.mask, logps) - select(spans.mask, ref_logps)


def check_kl(kl: KL) -> None:
    """Raise ValueError for an estimator that does nothing as a loss."""
    if kl is k1:
        raise ValueError(
            "expected an estimator with a gradient for a loss, got k1, whose expected gradient is "
            "0; use k3_weighted or k2, or put it in the reward (ppo, reinforce_pp)"
        )


def k2(
    logps: Float[Array, "b t"],
    old_logps: Float[Array, "b t"],
    ref_logps: Float[Array, "b t"],
    spans: Spans,
) -> Float[Array, "b t"]:
    """d²/2: the gradient of the reverse KL(π‖π_ref), biased in value."""
    return k1(logps, old_logps, ref_logps, spans) ** 2 / 2


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
