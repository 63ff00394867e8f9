"""The one place that knows the kinds of weights.

A weight is raw, quantised, low-rank on one of these, or merged from that; always [..., in, out].
Tiled is a raw one's layout.
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
from einops import rearrange
from jaxtyping import Array, Float, Int, Key

from .lora import LowRank, Merged, values_of
from .quantized import Quantized
from .tiled import Tiled

# Unnamed axes: an alias is used for several weights in one signature, whose sizes differ.
Weight = Float[Array, "... _ _"] | LowRank | Quantized | Merged | Tiled

# Dense numbers of a quantised weight live as long as one product: the backward pass makes them
# again. What the product gave may be kept, if whoever calls keeps such.
_briefly = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def linear(
    x: Float[Array, "*s i"], w: Weight, *, key: Key[Array, " b"] | None = None
) -> Float[Array, "*s o"]:
    """x @ w. `key`, one for each row of x's leading axis, turns the adapters' dropout on."""
    match w:
        case LowRank():
            inner = x if key is None or w.dropout == 0 else _dropout(x, w.dropout, key)
            low = _cheap_matmul(_matmul(inner, w.a.astype(x.dtype)), w.b.astype(x.dtype))
            out = linear(x, w.base) + jnp.asarray(w.scale, x.dtype) * low
            return out if w.magnitude is None else out * gains(w).astype(x.dtype)
        case Quantized():
            return _briefly(lambda x, w: _matmul(x, w.dense(x.dtype)))(x, w)
        case Merged():
            return _matmul(x, w.value)
        case Tiled():
            blocks = jnp.einsum("ni,coi->cno", x.reshape(-1, x.shape[-1]), w.blocks)
            return blocks.swapaxes(0, 1).reshape(*x.shape[:-1], -1)
        case _:
            return _matmul(x, w)


def transposed_linear(x: Float[Array, "*s o"], w: Weight) -> Float[Array, "*s i"]:
    """x @ wᵀ, float32: the logits of hidden states, by embeddings."""
    match w:
        case LowRank():
            x = x if w.magnitude is None else x * gains(w).astype(x.dtype)
            low = transposed_linear(
                transposed_linear(x, w.b.astype(x.dtype)).astype(x.dtype), w.a.astype(x.dtype)
            )
            return transposed_linear(x, w.base) + w.scale * low
        case Quantized():
            return _briefly(lambda x, w: transposed_linear(x, w.dense(x.dtype)))(x, w)
        case Merged():
            return transposed_linear(x, w.value)
        case Tiled():
            return transposed_linear(x, dense(w))
    flat = x.reshape(-1, x.shape[-1])  # w · xᵀ: on CPUs as fast as x · wᵀ, for few rows faster
    out = jnp.einsum("io,no->in", w, flat, preferred_element_type=jnp.float32)
    return out.T.reshape(*x.shape[:-1], -1)


def lookup(w: Weight, index: Int[Array, "*s"]) -> Float[Array, "*s o"]:
    """Rows w[index]: the embeddings of tokens."""
    match w:
        case LowRank():
            base = lookup(w.base, index)
            low = (w.scale * (w.a[index] @ w.b)).astype(base.dtype)
            return base + low if w.magnitude is None else (base + low) * gains(w).astype(base.dtype)
        case Quantized():
            return w.rows(index)
        case Merged():
            return w.value[index]
        case Tiled():
            return dense(w)[index]
        case _:
            return w[index]


def gains(w: LowRank) -> Float[Array, "*l o"]:
    """m / ‖W + s·AB‖, of every column: what DoRA multiplies the outputs by.

    The norm is a constant in the gradient. ‖W + sAB‖² = ‖W‖² + 2s·⟨AᵀW, B⟩ + s²·⟨AᵀAB, B⟩: no
    array as large as W is made for it.
    """
    assert w.magnitude is not None
    a, b, base = jax.lax.stop_gradient((w.a, w.b, values_of(w.base)))
    high = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    cross = (high(a.mT, base) * b).sum(-2)
    own = (high(high(a.mT, a), b) * b).sum(-2)
    square = (base * base).sum(-2) + 2 * w.scale * cross + w.scale**2 * own
    return w.magnitude / jnp.sqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))


def _matmul(x: Float[Array, "*s i"], w: Float[Array, "i o"]) -> Float[Array, "*s o"]:
    """x @ w with x as one matrix: over several axes XLA's CPU backend transposes, in the gradient,
    both x and the cotangent element by element, which takes longer than the product itself.
    """
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def _cheap_matmul(x: Float[Array, "*s r"], b: Float[Array, "r o"]) -> Float[Array, "*s o"]:
    """x @ b as a batch of one: a product that `dots_with_no_batch_dims_saveable` does not keep. It
    is as large as x W beside it and made again for next to nothing.
    """
    flat = x.reshape(1, -1, x.shape[-1])
    return jnp.einsum("gnr,gro->gno", flat, b[None]).reshape(*x.shape[:-1], b.shape[-1])


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
            out = grouped_linear(x, w.base, sizes) + jnp.asarray(w.scale, x.dtype) * low
            if w.magnitude is None:
                return out
            of_rows = jnp.repeat(gains(w), sizes, 0, total_repeat_length=x.shape[0])
            return out * of_rows.astype(x.dtype)
        case Quantized():
            return _briefly(lambda x, w: grouped_linear(x, w.dense(x.dtype), sizes))(x, w)
        case Merged():
            return grouped_linear(x, w.value, sizes)
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
    """The weight as one raw array: W + s·A@B, with DoRA's columns as long as it says."""
    match w:
        case LowRank():
            base = dense(w.base)
            low = jnp.matmul(w.a, w.b, precision=jax.lax.Precision.HIGHEST)
            total = base.astype(low.dtype) + jnp.asarray(w.scale, low.dtype) * low
            if w.magnitude is not None:
                total *= (w.magnitude / jnp.linalg.norm(total, axis=-2))[..., None, :]
            return total.astype(base.dtype)
        case Quantized():
            return w.dense()
        case Merged():
            return w.value
        case Tiled():
            return rearrange(w.blocks, "c o i -> i (c o)")
        case _:
            return w


def shape_of(w: Weight) -> tuple[int, ...]:
    """The shape [..., in, out] of a weight of any kind."""
    match w:
        case LowRank():
            return shape_of(w.base)
        case Merged():
            return w.value.shape
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
