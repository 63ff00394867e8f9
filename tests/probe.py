"""What the contract is asked of: a factory, set up for a task whose optimum is known; and what it
tries on the factory's batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from purepost import Algorithm
from purepost.mean import Metrics
from purepost.models.decoder import Decoder
from purepost.types import Rows
from tests.preferences import VOCAB


@dataclass(frozen=True)
class Probe:
    """A factory, set up for a task whose optimum is known."""

    factory: str
    build: Callable[..., Algorithm]  # (optimizer, **options)
    models: Callable[[Decoder], Any]  # what the algorithm trains, around a decoder
    data: Callable[[int], Callable[[int], Any]]  # seed → step → data
    gap: Callable[[Any, Metrics, Any], float]  # (models, last metrics, data) → from the optimum
    samples: bool = True  # whether the rollout draws anything from its key
    lora: tuple[bool, ...] = (False, True)  # with adapters, without
    options: dict[str, Any] = field(default_factory=dict)
    still: Callable[[Any], Any] = lambda frozen: frozen  # what of the frozen models never moves

    def algorithm(self, optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
        """The factory called."""
        return self.build(optimizer, **(self.options | options))


class Recorded(NamedTuple):
    """An optimizer's state, and the last gradient it was given."""

    inner: PyTree
    gradient: PyTree


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, keeping the last gradient in its state."""

    def init(params: PyTree) -> Recorded:
        return Recorded(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: PyTree, state: Recorded, params: PyTree = None) -> tuple[PyTree, Recorded]:
        updates, inner = optimizer.update(grads, state.inner, params)
        return updates, Recorded(inner, grads)

    # optax types both as chex pytrees.
    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def all_rows(batch: PyTree) -> list[Rows]:
    """Every Rows of a batch."""
    found = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, Rows))
    return [x for x in found if isinstance(x, Rows)]


def padding(rows: Rows) -> np.ndarray:
    """Tokens that neither see nor are seen by another."""
    index = np.arange(rows.tokens.shape[1])
    alone = (np.asarray(rows.parent) == index) & (np.asarray(rows.end) == index + 1)
    return alone & ~np.asarray(rows.mask)


def poison(batch: PyTree) -> PyTree:
    """The batch with other tokens in its padding, and NaN at masked tokens in every float field."""
    if isinstance(batch, tuple):
        return tuple(map(poison, batch))
    (rows,) = all_rows(batch)
    hidden = jnp.asarray(padding(rows))

    def worse(x: Any) -> Any:
        if isinstance(x, Rows):
            other = (x.tokens + 7) % VOCAB
            return eqx.tree_at(lambda r: r.tokens, x, jnp.where(hidden, other, x.tokens))
        if eqx.is_inexact_array(x) and x.shape == rows.mask.shape:
            return jnp.where(rows.mask, x, jnp.nan)
        return x

    return jax.tree.map(worse, batch, is_leaf=lambda x: isinstance(x, Rows))
