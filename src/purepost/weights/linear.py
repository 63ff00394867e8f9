"""The one place that knows the kinds of weights.

A weight is raw, low-rank on a base, … ; always [..., in, out]. Tiled is a raw one's layout.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
from einops import rearrange
from jaxtyping import Array, Float, Int, Key

from .lora import LowRank
from .tiled import Tiled

# Unnamed axes: an alias is used for several weights in one signature, whose sizes differ.
Weight = Float[Array, "... _ _"] | LowRank | Tiled


def linear(
    x: Float[Array, "*s i"], w: Weight, *, key: Key[Array, " b"] | None = None
) -> Float[Array, "*s o"]:
    """x @ w. `key`, one for each row of x's leading axis, turns the adapters' dropout on."""
    match w:
        case LowRank():
            inner = x if key is None or w.dropout == 0 else _dropout(x, w.dropout, key)
            low = _matmul(_matmul(inner, w.a.astype(x.dtype)), w.b.astype(x.dtype))
            return linear(x, w.base) + jnp.asarray(w.scale, x.dtype) * low
        case Tiled():
            blocks = jnp.einsum("ni,coi->cno", x.reshape(-1, x.shape[-1]), w.blocks)
            return blocks.swapaxes(0, 1).reshape(*x.shape[:-1], -1)
        case _:
            return _matmul(x, w)


def _matmul(x: Float[Array, "*s i"], w: Float[Array, "i o"]) -> Float[Array, "*s o"]:
    """x @ w with x as one matrix: over several axes XLA's CPU backend transposes, in the gradient,
    both x and the cotangent element by element, which takes longer than the product itself.
    """
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def grouped_linear(
    x: Float[Array, "n i"],
    w: Weight,
    sizes: Int[Array, " e"],
    *,
    key: Key[Array, " n"] | None = None,
) -> Float[Array, "n o"]:
    """x @ w[group], w [e, i, o], of rows sorted by group, `sizes` of them in each; `key` as in
    `linear`.

    Rows are laid out in blocks of one group each: the work grows with the rows, where that of
    `jax.lax.ragged_dot` on CPUs grows with rows × groups.
    """
    match w:
        case LowRank():
            inner = x if key is None or w.dropout == 0 else _dropout(x, w.dropout, key)
            low = grouped_linear(inner, w.a.astype(x.dtype), sizes)
            low = grouped_linear(low, w.b.astype(x.dtype), sizes)
            return grouped_linear(x, w.base, sizes) + jnp.asarray(w.scale, x.dtype) * low
        case Tiled():
            raise TypeError("expected one array of all groups, got a tiled weight of one")
    n, groups = x.shape[0], w.shape[0]
    size = -(-n // groups)  # of a block, in rows
    count = min(n, n // size + groups)  # of blocks: enough for any sizes
    blocks = -(-sizes // size)  # of each group
    first = jnp.cumsum(blocks) - blocks
    group = jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=n)
    place = first[group] * size + jnp.arange(n) - (jnp.cumsum(sizes) - sizes)[group]
    laid = jnp.zeros((count * size, x.shape[1]), x.dtype).at[place].set(x, unique_indices=True)
    owner = jnp.repeat(jnp.arange(groups), blocks, total_repeat_length=count)
    out = jnp.einsum("cbi,cio->cbo", laid.reshape(count, size, -1), w[owner])
    return out.reshape(count * size, -1).at[place].get(unique_indices=True)


def dense(w: Weight) -> Float[Array, "... _ _"]:
    """The weight as one raw array: W + s·A@B."""
    match w:
        case LowRank():
            base = dense(w.base)
            low = jnp.matmul(w.a, w.b, precision=jax.lax.Precision.HIGHEST)
            return (base.astype(low.dtype) + jnp.asarray(w.scale, low.dtype) * low).astype(
                base.dtype
            )
        case Tiled():
            return rearrange(w.blocks, "c o i -> i (c o)")
        case _:
            return w


def shape_of(w: Weight) -> tuple[int, ...]:
    """The shape [..., in, out] of a weight of any kind."""
    match w:
        case LowRank():
            return shape_of(w.base)
        case Tiled():
            c, o, i = w.blocks.shape
            return i, c * o
        case _:
            return w.shape


def _dropout(x: Float[Array, "b *s"], rate: float, key: Key[Array, " b"]) -> Float[Array, "b *s"]:
    """x with entries zeroed at `rate` and the others scaled up; a row's zeros depend on its own
    key only.
    """
    keep = jax.vmap(lambda k: jr.bernoulli(k, 1 - rate, x.shape[1:]))(key)
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
