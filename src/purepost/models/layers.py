"""Layers of the decoder: norm, rotary positions, attention over forest rows, gated MLP."""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from ..types import Rows
from ..weights import Weight, linear

BLOCK = 128  # queries per attention block, tokens


def rms_norm(
    x: Float[Array, "*s d"], scale: Float[Array, " d"], eps: float
) -> Float[Array, "*s d"]:
    """x / √(mean x² + ε) · scale, in float32. Source: Zhang & Sennrich, 1910.07467, eq. 4."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Kinds: "linear", "llama3".
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"expected RoPE scaling 'linear' or 'llama3', got {self.kind!r}")


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """Inverse frequencies, radians per token.

    Source: Su et al., RoFormer, 2104.09864, §3.2.2; Llama 3.1's by wavelength.
    """
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)  # 0: long waves, all of the stretch; 1: short waves, none
    return (frequencies * ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)


def rope_angles(
    positions: Int[Array, "*s"], frequencies: Float[np.ndarray, " half"]
) -> tuple[Float[Array, "*s half"], Float[Array, "*s half"]]:
    """(cos, sin) of position × frequency."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*s h k"], cos: Float[Array, "*s half"], sin: Float[Array, "*s half"]
) -> Float[Array, "*s h k"]:
    """Turn the pairs (x_i, x_{i + k/2}) of every head by the angles."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    c, s = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)


def visible(
    end: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    start: int,
    stop: int,
    window: int | None = None,
) -> Bool[Array, "b q s"]:
    """Which of the tokens [0, stop) the queries [start, stop) see: j ≤ i < end[j], themselves,
    and no further than the window.
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
    window: int | None = None,
) -> Float[Array, "b t h k"]:
    """Softmax attention over forest rows, h query heads sharing n key heads, a block of queries
    at a time.

    A block's scores are computed again in the backward pass, so no [t, t] array is kept.
    """
    b, t, h, width = q.shape
    n = k.shape[2]
    q = (q * jnp.asarray(width**-0.5, q.dtype)).reshape(b, t, n, h // n, width)

    @jax.checkpoint
    def block(
        q: Float[Array, "b q n m k"],
        k: Float[Array, "b s n k"],
        v: Float[Array, "b s n k"],
        seen: Bool[Array, "b q s"],
    ) -> Float[Array, "b q n m k"]:
        scores = jnp.einsum("bqnmk,bsnk->bnmqs", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf))
        return jnp.einsum("bnmqs,bsnk->bqnmk", weights.astype(v.dtype), v)

    blocks = []
    for start in range(0, t, BLOCK):
        stop = min(start + BLOCK, t)
        seen = visible(rows.end, rows.positions, start, stop, window)
        blocks.append(block(q[:, start:stop], k[:, :stop], v[:, :stop], seen))
    out = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 1)
    return out.reshape(b, t, h, width)


class Attention(eqx.Module):
    """Projections of grouped-query attention. Leaves may carry a leading layer axis."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight


class MLP(eqx.Module):
    """down(silu(gate x) · up x). Source: Shazeer, 2002.05202, eq. 6."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(
        self, x: Float[Array, "*s d"], *, key: Key[Array, " b"] | None = None
    ) -> Float[Array, "*s d"]:
        """The block's output; `key` (one per row) turns adapter dropout on."""
        gate = linear(x, self.gate, key=subkey(key, 4))
        up = linear(x, self.up, key=subkey(key, 5))
        return linear(jax.nn.silu(gate) * up, self.down, key=subkey(key, 6))


def subkey(key: Key[Array, " b"] | None, name: int) -> Key[Array, " b"] | None:
    """One key per row, for one use inside a layer."""
    return None if key is None else jax.vmap(lambda k: jax.random.fold_in(k, name))(key)
