"""Divergences of a student's distribution from a teacher's, per token, over the whole vocabulary or
over what attention sees; distances of their features.

A divergence takes (teacher, student), log-probabilities [..., v], and gives nats [...]. Entries of
probability 0 add nothing.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..types import Scalar

LEAST = -1e9  # nats: a log-probability of 0 whose sums and gradients are finite
# (teacher, student) → nats
Divergence = Callable[[Float[Array, "*s v"], Float[Array, "*s v"]], Float[Array, "*s"]]
# (teacher, student) → how far apart two vectors of features are
Distance = Callable[[Float[Array, "*s d"], Float[Array, "*s d"]], Float[Array, "*s"]]


def _kl(p: Float[Array, "*s v"], q: Float[Array, "*s v"]) -> Float[Array, "*s"]:
    """Σ p (log p − log q), of log-probabilities."""
    some = jnp.isfinite(p)
    difference = jnp.where(some, p, 0.0) - jnp.where(some, q, 0.0)
    return (jnp.exp(p) * difference).sum(-1)


def forward_kl(teacher: Float[Array, "*s v"], student: Float[Array, "*s v"]) -> Float[Array, "*s"]:
    """KL(teacher‖student): the student covers all that the teacher does.

    Source: Hinton et al., Distilling the knowledge in a neural network, 1503.02531, §2.
    """
    return _kl(teacher, student)


def reverse_kl(teacher: Float[Array, "*s v"], student: Float[Array, "*s v"]) -> Float[Array, "*s"]:
    """KL(student‖teacher): the student stays within what the teacher does.

    Source: Gu et al., MiniLLM, 2306.08543, §2.
    """
    return _kl(student, teacher)


def _mixed(
    teacher: Float[Array, "*s v"], student: Float[Array, "*s v"], *, beta: Scalar
) -> Float[Array, "*s"]:
    log_beta, log_rest = jnp.log(jnp.asarray(beta)), jnp.log1p(-jnp.asarray(beta))
    t, s = (jnp.maximum(x, LEAST) for x in (teacher, student))
    middle = jnp.logaddexp(t + log_beta, s + log_rest)
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


def jensen_shannon(beta: Scalar = 0.5) -> Divergence:
    """β·KL(teacher‖M) + (1 − β)·KL(student‖M), M = β·teacher + (1 − β)·student, 0 < β < 1.

    Divided by β it tends to the forward KL as β → 0, by 1 − β to the reverse KL as β → 1; itself it
    tends to 0 at both ends, where `forward_kl` and `reverse_kl` are to be used instead.
    Source: Agarwal et al., On-policy distillation (GKD), 2306.13649, eq. 1.
    """
    if isinstance(beta, float | int) and not 0 < beta < 1:
        raise ValueError(
            f"expected 0 < beta < 1, got {beta}; use forward_kl for 0 and reverse_kl for 1"
        )
    return partial(_mixed, beta=beta)


def among_top(k: int, divergence: Divergence) -> Divergence:
    """The divergence over the teacher's k likeliest tokens, both made to sum to 1 over them."""
    if k < 1:
        raise ValueError(f"expected k ≥ 1 tokens, got {k}")

    def restricted(
        teacher: Float[Array, "*s v"], student: Float[Array, "*s v"]
    ) -> Float[Array, "*s"]:
        best, index = jax.lax.top_k(teacher, min(k, teacher.shape[-1]))
        kept = jnp.take_along_axis(student, index, -1)
        return divergence(jax.nn.log_softmax(best), jax.nn.log_softmax(kept))

    return restricted


def of_probabilities(distance: Distance) -> Divergence:
    """The distance of the two distributions as vectors.

    With `cosine_distance` it is half the squared distance of the two, each divided by its length.
    Source: Zagoruyko & Komodakis, Paying more attention to attention, 1612.03928, eq. 2.
    """
    return lambda teacher, student: distance(jnp.exp(teacher), jnp.exp(student))


def cosine_distance(
    teacher: Float[Array, "*s d"], student: Float[Array, "*s d"]
) -> Float[Array, "*s"]:
    """1 − cos of the angle between two vectors, from 0 to 2; 1 where one of them is 0."""
    t, s = (x.astype(jnp.float32) for x in (teacher, student))
    t_square, s_square = ((x * x).sum(-1) for x in (t, s))
    scale = jax.lax.rsqrt(jnp.where(t_square > 0, t_square, 1.0))
    scale *= jax.lax.rsqrt(jnp.where(s_square > 0, s_square, 1.0))
    return 1 - (t * s).sum(-1) * scale


def squared_error(
    teacher: Float[Array, "*s d"], student: Float[Array, "*s d"]
) -> Float[Array, "*s"]:
    """(t − s)², the mean over features.

    Source: Romero et al., FitNets, 1412.6550, eq. 3 (the sum, halved); as a mean Jiao et al.,
    TinyBERT, 1909.10351, eq. 8.
    """
    t, s = (x.astype(jnp.float32) for x in (teacher, student))
    return ((t - s) ** 2).mean(-1)


def pool_features(x: Float[Array, "*s d"], size: int) -> Float[Array, "*s o"]:
    """d features averaged to `size`: feature i of the means is of those from ⌊i d/size⌋ up to
    ⌈(i+1) d/size⌉. Error: a size that is larger.
    """
    wide = x.shape[-1]
    if not 1 <= size <= wide:
        raise ValueError(f"expected to pool {wide} features to at most as many, got {size}")
    if size == wide:
        return x
    i, j = jnp.arange(size, dtype=jnp.int32), jnp.arange(wide, dtype=jnp.int32)[:, None]
    window = (j >= i * wide // size) & (j < -(-(i + 1) * wide // size))
    means = window.astype(jnp.float32) / window.sum(0, dtype=jnp.float32)
    return jnp.matmul(x.astype(jnp.float32), means, precision=jax.lax.Precision.HIGHEST)
