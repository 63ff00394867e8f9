"""Losses of tokens that are given, per token, to be minimised. Log-probabilities in nats."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..types import Scalar


def label_smoothed(
    logps: Float[Array, "b t"], mean_logps: Float[Array, "b t"], *, epsilon: Scalar
) -> Float[Array, "b t"]:
    """−(1 − ε) log p(target) − ε mean_v log p(v): the target is meant with probability 1 − ε, else
    any token.

    Source: Szegedy et al., Rethinking the Inception Architecture, 1512.00567, §7.
    """
    return -(1 - epsilon) * logps - epsilon * mean_logps


def squared_normalizer(normalizers: Float[Array, "b t"]) -> Float[Array, "b t"]:
    """(log Z)²: keeps logits from drifting. Source: Chowdhery et al., PaLM, 2204.02311, §5."""
    return normalizers**2


def probability(logps: Float[Array, "b t"]) -> Float[Array, "b t"]:
    """sg(π): as the weight of −log π it gives the gradient −∇π.

    Source: Wu et al., On the Generalization of SFT (DFT), 2508.05629.
    """
    return jax.lax.stop_gradient(jnp.exp(logps))
