"""Means kept as two sums, so that they stay exact over micro-batches, shards and steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .types import Rows, Scalar


class Mean(eqx.Module):
    """Σ total / Σ weight.

    Add Means by `jax.tree.map`; divide once, at the end. A weight of 0 gives 0.
    """

    total: Float[Array, "..."]
    weight: Float[Array, "..."]

    @property
    def value(self) -> Float[Array, "..."]:
        """total / weight, and 0 where the weight is 0."""
        empty = self.weight == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.weight))

    def times(self, factor: float | int | Float[Array, ""]) -> "Mean":
        """The Mean of factor · total, over the same weight: a weighted term of a loss."""
        return Mean(factor * self.total, self.weight)


# The quantiles that stand for a distribution: its ends, its middle, and bands of 80 % and 50 %.
LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
Metrics = dict[str, Mean]
Terms = dict[str, Mean]


def add(a: dict[str, Mean], b: dict[str, Mean]) -> dict[str, Mean]:
    """The sums of two sets of Means with the same names."""
    return jax.tree.map(jnp.add, a, b)


def weighted(means: dict[str, Mean], **factors: Scalar) -> dict[str, Mean]:
    """The named ones of the Means, each times its factor: the terms of a loss."""
    return {name: means[name].times(factor) for name, factor in factors.items()}


def select(mask: Bool[Array, "*s"], x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x where the mask is True, else 0: neither the value nor the gradient of a masked entry
    passes.
    """
    return jnp.where(mask, x, 0.0)


def masked_mean(x: Float[Array, "*s"], mask: Bool[Array, "*s"]) -> Mean:
    """Σ x·m / Σ m over everything."""
    return Mean(select(mask, x).sum(), mask.sum(dtype=jnp.float32))


def scalar_mean(value: float | Float[Array, ""] | Int[Array, ""]) -> Mean:
    """One number as a Mean of weight 1."""
    return Mean(jnp.asarray(value, jnp.float32), jnp.ones((), jnp.float32))


def mean_of(x: Float[Array, "*s"]) -> Mean:
    """The plain mean of all entries."""
    return Mean(x.sum(dtype=jnp.float32), jnp.asarray(x.size, jnp.float32))


def quantiles(x: Float[Array, "*s"], mask: Bool[Array, "*s"] | None = None) -> Mean:
    """The `LEVELS` of a distribution as one metric, to be named "<what>/quantiles".

    Linear between order statistics. Nothing under the mask: weight 0.
    """
    weight = jnp.ones((), jnp.float32)
    if mask is not None:
        weight = mask.any().astype(jnp.float32)
        x = jnp.where(mask, x, jnp.nan)
    levels = jnp.asarray(LEVELS, jnp.float32)
    total = jnp.nanquantile(x.astype(jnp.float32).reshape(-1), levels)
    return Mean(jnp.where(weight > 0, total, 0.0), weight)


class Spans(eqx.Module):
    """Which tokens of a row are trained, which episode each belongs to, and what each episode
    counts.

    A filler or an unscored episode has weight 0; one whose tokens are all masked still counts.
    """

    mask: Bool[Array, "b t"]
    episode: Int[Array, "b t"]
    weights: Float[Array, "b e"]

    def sum(self, x: Float[Array, "b t"]) -> Float[Array, "b e"]:
        """Σ_t x·m of every episode."""
        member = self.episode[:, :, None] == jnp.arange(self.weights.shape[1])
        member &= self.mask[:, :, None]
        return jnp.where(member, x[:, :, None], 0.0).sum(1)

    @property
    def lengths(self) -> Float[Array, "b e"]:
        """T_i, trained tokens of every episode."""
        return self.sum(jnp.ones(self.mask.shape))

    def spread(self, x: Float[Array, "b e"]) -> Float[Array, "b t"]:
        """Every episode's number at its trained tokens, 0 elsewhere."""
        return select(self.mask, jnp.take_along_axis(x, self.episode, 1))


def spans_of(rows: Rows) -> Spans:
    """The spans of rows whose every episode with a trained token counts 1."""
    every = Spans(rows.mask, rows.episode, jnp.ones((rows.tokens.shape[0], rows.episodes)))
    return Spans(rows.mask, rows.episode, (every.lengths > 0).astype(jnp.float32))
