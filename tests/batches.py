"""What the contract tries on batches: gradients recorded, rows found, what is masked poisoned."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from experiments.probes.probe import CONFIG
from purepost.types import Rows


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
            other = (x.tokens + 7) % CONFIG.vocab_size
            return eqx.tree_at(lambda r: r.tokens, x, jnp.where(hidden, other, x.tokens))
        if eqx.is_inexact_array(x) and x.shape == rows.mask.shape:
            return jnp.where(rows.mask, x, jnp.nan)
        return x

    return jax.tree.map(worse, batch, is_leaf=lambda x: isinstance(x, Rows))
