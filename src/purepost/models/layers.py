"""Layers of the decoder: norm, attention over forest rows, gated MLP."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key

from ..types import Rows
from ..weights import Weight, linear
from .remat import ATTENTION

BLOCK = 128  # queries per attention block, tokens

Activation = Callable[[Array], Array]


def gelu(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x·Φ(x) by its tanh approximation. Source: Hendrycks & Gimpel, 1606.08415, §2."""
    return jax.nn.gelu(x, approximate=True)


def soft_cap(x: Float[Array, "*s"], cap: float | None) -> Float[Array, "*s"]:
    """cap · tanh(x / cap): nearly x near 0, never beyond ±cap. None: x.

    Source: Gemma Team, Gemma 2, 2408.00118, §2.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


def rms_norm(
    x: Float[Array, "*s d"], scale: Float[Array, " d"], eps: float, offset: float = 0.0
) -> Float[Array, "*s d"]:
    """x / √(mean x² + ε) · (offset + scale), in float32.

    Source: Zhang & Sennrich, 1910.07467, eq. 4.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32)
    return (x32 * (scale + offset if offset else scale)).astype(x.dtype)


@runtime_checkable
class AttentionFn(Protocol):
    """Softmax attention over forest rows; `attention` is the reference."""

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b t n k"],
        v: Float[Array, "b t n k"],
        rows: Rows,
        window: int | Int[Array, ""] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Float[Array, "b t h k"]:
        """A token's values, weighted over what it sees: see `visible`."""
        ...


def visible(
    end: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    start: int,
    stop: int,
    window: int | Int[Array, ""] | None = None,
) -> Bool[Array, "b q s"]:
    """Which of the tokens [0, stop) the queries [start, stop) see: j ≤ i < end[j], themselves,
    and no further than the window: fewer tokens back on their path than it.
    """
    i = jnp.arange(start, stop, dtype=jnp.int32)[:, None]
    j = jnp.arange(stop, dtype=jnp.int32)[None, :]
    seen = (j <= i) & (i < end[:, None, :stop])
    if window is not None:
        seen &= positions[:, start:stop, None] - positions[:, None, :stop] < window
    return seen | (i == j)


def attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t n k"],
    v: Float[Array, "b t n k"],
    rows: Rows,
    window: int | Int[Array, ""] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "b t h k"]:
    """Softmax attention over forest rows, h query heads sharing n key heads, a block of queries
    at a time. `scale` multiplies the queries: by default 1/√k.

    A block's scores are computed again in the backward pass, so no [t, t] array is kept. Keys past
    a block are left out, others cannot be: who sees whom is data, and a window counts depths, whose
    keys may lie anywhere before. `flash.FlashAttention` leaves out what the data rule out.
    """
    b, t, h, width = q.shape
    n = k.shape[2]
    scale = width**-0.5 if scale is None else scale
    q = rearrange(q * jnp.asarray(scale, q.dtype), "b t (n m) k -> b n m t k", n=n)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

    @jax.checkpoint
    def block(
        q: Float[Array, "b n m q k"],
        k: Float[Array, "b n s k"],
        v: Float[Array, "b n s k"],
        seen: Bool[Array, "b q s"],
    ) -> Float[Array, "b n m q k"]:
        scores = jnp.einsum("bnmqk,bnsk->bnmqs", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None, None], soft_cap(scores, softcap), -jnp.inf)
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bnmqs,bnsk->bnmqk", weights.astype(v.dtype), v)

    blocks = []
    for start in range(0, t, BLOCK):
        stop = min(start + BLOCK, t)
        seen = visible(rows.end, rows.positions, start, stop, window)
        blocks.append(block(q[..., start:stop, :], k[:, :, :stop], v[:, :, :stop], seen))
    out = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 3)
    out = rearrange(out, "b n m t k -> b t (n m) k")
    return checkpoint_name(out, ATTENTION)


class Attention(eqx.Module):
    """Projections of grouped-query attention. Leaves may carry a leading layer axis."""

    q: Weight
    k: Weight | None  # None: it attends to another layer's
    v: Weight | None  # None: the keys, or another layer's
    o: Weight
    q_bias: Float[Array, "*l _"] | None = None
    k_bias: Float[Array, "*l _"] | None = None
    v_bias: Float[Array, "*l _"] | None = None
    q_norm: Float[Array, "*l k"] | None = None  # of each head's queries, and of its keys
    k_norm: Float[Array, "*l k"] | None = None


class MLP(eqx.Module):
    """down(activation(gate x) · up x). Source: Shazeer, 2002.05202, eq. 6."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(
        self,
        x: Float[Array, "*s d"],
        activation: Activation,
        *,
        key: Key[Array, " b"] | None = None,
    ) -> Float[Array, "*s d"]:
        """The block's output; `key` (one per row) turns adapter dropout on."""
        gate = linear(x, self.gate, key=subkey(key, 4))
        up = linear(x, self.up, key=subkey(key, 5))
        return linear(activation(gate) * up, self.down, key=subkey(key, 6))


def subkey(key: Key[Array, " b"] | None, name: int) -> Key[Array, " b"] | None:
    """One key per row, for one use inside a layer."""
    return None if key is None else jax.vmap(lambda k: jax.random.fold_in(k, name))(key)
