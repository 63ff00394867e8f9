"""Rows for the tests of losses, and float64 twins in NumPy, written from the formulas."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from purepost.mean import Spans


def spans_of(mask: Sequence[Sequence[int]], weights: Sequence[float] | None = None) -> Spans:
    """One episode in each row, of weight 1 unless said."""
    m = jnp.asarray(mask, bool)
    w = jnp.ones(m.shape[0]) if weights is None else jnp.asarray(weights, jnp.float32)
    return Spans(m, jnp.zeros(m.shape, jnp.int32), w[:, None])


def episodes_of(
    values: Float[np.ndarray, "b t"],
    mask: Bool[np.ndarray, "b t"],
    episode: Int[np.ndarray, "b t"],
    weights: Float[np.ndarray, "b e"],
) -> list[tuple[list[float], float]]:
    """Every episode's trained values and its weight."""
    found = []
    for i, j in np.ndindex(*weights.shape):
        mine = np.asarray(mask[i]) & (np.asarray(episode[i]) == j)
        found.append((values[i][mine].astype(np.float64).tolist(), float(weights[i, j])))
    return found


Twin = Callable[[list[tuple[list[float], float]]], tuple[float, float]]


def token_mean(episodes: list[tuple[list[float], float]]) -> tuple[float, float]:
    """Σ ℓ / Σ T over the episodes that count."""
    return (
        sum(w * v for values, w in episodes for v in values),
        sum(w * len(values) for values, w in episodes),
    )


def sequence_mean(episodes: list[tuple[list[float], float]]) -> tuple[float, float]:
    """The mean over episodes of each one's mean."""
    return (
        sum(w * sum(values) / max(len(values), 1) for values, w in episodes),
        sum(w for _, w in episodes),
    )


def sequence_sum(episodes: list[tuple[list[float], float]]) -> tuple[float, float]:
    """The mean over episodes of each one's sum."""
    return sum(w * sum(values) for values, w in episodes), sum(w for _, w in episodes)


def over(max_tokens: int) -> Twin:
    """The sum over B · L_max."""

    def twin(episodes: list[tuple[list[float], float]]) -> tuple[float, float]:
        total, count = sequence_sum(episodes)
        return total, count * max_tokens

    return twin


def clipped(r: float, a: float, low: float, high: float) -> float:
    """−min(r a, clip(r) a)."""
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)
