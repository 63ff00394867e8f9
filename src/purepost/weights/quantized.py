"""Weights in few bits: a code for every number, and a scale for every block of a column.

value = level(code) · scale        8 bits: the code is its level; 4 bits: one of a table's sixteen

Double quantisation keeps the scales in 8 bits as well: scale = offset + code · outer.

Source: Dettmers et al., QLoRA, 2305.14314, §3 and appendix E (NF4's table, double quantisation);
Dettmers et al., LLM.int8(), 2208.07339, eq. 2 (absmax). Differs from the papers: blocks run along
a column, the inputs of one output feature, and never into the next; the scales' codes are evenly
spaced integers, where QLoRA's are 8-bit floats.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Shaped, UInt8

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
INT4 = tuple(k / 7 for k in range(-8, 8))
OUTER = 256  # scales that share one of theirs
FP8_MAX = 448.0  # the largest float8_e4m3fn


class Scales(eqx.Module):
    """Scales that are quantised themselves."""

    codes: Int8[Array, "*l n o"]
    outer: Float[Array, "*l m"]  # of every `OUTER` codes, in their order
    offset: Float[Array, "*l"]

    def values(self) -> Float[Array, "*l n o"]:
        """The scales, float32."""
        *lead, n, o = self.codes.shape
        codes = _in_groups(self.codes.reshape(*lead, n * o).astype(jnp.float32))
        scales = (codes * self.outer[..., None]).reshape(*lead, -1)[..., : n * o]
        return (scales + self.offset[..., None]).reshape(*lead, n, o)


class Quantized(eqx.Module):
    """A weight [in, out] in 8 or 4 bits a number. Two codes of 4 bits share a byte: those of a
    block's first half lie in the low bits.
    """

    codes: Shaped[Array, "*l _ o"]  # [in, out] int8 or float8; 4 bits: [in / 2, out] uint8
    scales: Float[Array, "*l n o"] | Scales  # of n blocks in a column
    levels: tuple[float, ...] | None = eqx.field(static=True)  # what the codes of 4 bits stand for
    dtype: Any = eqx.field(static=True)  # of the weight that it stands for

    @property
    def shape(self) -> tuple[int, ...]:
        """[*l, in, out]."""
        *lead, rows, out = self.codes.shape
        return (*lead, rows if self.levels is None else 2 * rows, out)

    @property
    def blocks(self) -> int:
        """Blocks in a column."""
        scales = self.scales.codes if isinstance(self.scales, Scales) else self.scales
        return scales.shape[-2]

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "*l i o"]:
        """The numbers it stands for, by default in its own dtype."""
        codes = rearrange(self.codes, "... (n b) o -> ... n b o", n=self.blocks)
        if self.levels is not None:
            codes = jnp.concatenate([codes & 15, codes >> 4], -2)
        values = self._levels(codes) * scale_values(self.scales)[..., None, :]
        return values.reshape(self.shape).astype(self.dtype if dtype is None else dtype)

    def rows(self, index: Int[Array, "*s"]) -> Float[Array, "*s o"]:
        """The numbers of some rows of a weight [in, out] in its own dtype: a lookup of
        embeddings.
        """
        size = self.shape[-2] // self.blocks
        block, place = index // size, index % size
        if self.levels is None:
            codes = self.codes[index]
        else:
            half = size // 2
            low = place < half
            both = self.codes[block * half + jnp.where(low, place, place - half)]
            codes = jnp.where(low[..., None], both & 15, both >> 4)
        return (self._levels(codes) * scale_values(self.scales)[block]).astype(self.dtype)

    def _levels(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        if self.levels is None:
            return codes.astype(jnp.float32)
        return jnp.asarray(self.levels, jnp.float32)[codes.astype(jnp.int32)]


# (weight, block or None for the kind's usual one) → the weight in few bits.
Kind = Callable[[Float[Array, "*l i o"], int | None], Quantized]


def scale_values(scales: Float[Array, "*l n o"] | Scales) -> Float[Array, "*l n o"]:
    """The scales as float32, however they are held."""
    return scales.values() if isinstance(scales, Scales) else scales.astype(jnp.float32)


def int8(w: Float[Array, "*l i o"], block: int | None = None) -> Quantized:
    """8-bit integers, a scale for every output feature (or for every block of its inputs)."""
    blocks, scales = _scaled(w, block or w.shape[-2])
    codes = jnp.round(blocks * 127).astype(jnp.int8)
    return Quantized(codes.reshape(w.shape), scales / 127, None, w.dtype)


def fp8(w: Float[Array, "*l i o"], block: int | None = None) -> Quantized:
    """8-bit floats (e4m3), a scale for every output feature (or for every block of its inputs)."""
    blocks, scales = _scaled(w, block or w.shape[-2])
    codes = (blocks * FP8_MAX).astype(jnp.float8_e4m3fn)
    return Quantized(codes.reshape(w.shape), scales / FP8_MAX, None, w.dtype)


def int4(w: Float[Array, "*l i o"], block: int | None = None, *, double: bool = True) -> Quantized:
    """4-bit integers −7 … 7 in blocks of 64; `double`: their scales are quantised too."""
    return by_levels(w, INT4, block or 64, double=double)


def nf4(w: Float[Array, "*l i o"], block: int | None = None, *, double: bool = True) -> Quantized:
    """The sixteen quantiles of a normal distribution, in blocks of 64; `double`: their scales are
    quantised too.
    """
    return by_levels(w, NF4, block or 64, double=double)


def by_levels(
    w: Float[Array, "*l i o"], levels: tuple[float, ...], block: int, *, double: bool
) -> Quantized:
    """Every number as the nearest of sixteen levels of its block's largest. Error: an odd block."""
    if block % 2:
        raise ValueError(f"expected blocks of an even size, two codes to a byte, got {block}")
    blocks, scales = _scaled(w, block)
    between = np.asarray(levels[1:], np.float32) + np.asarray(levels[:-1], np.float32)
    codes = (blocks[..., None] > between / 2).sum(-1, dtype=jnp.uint8)
    first, second = jnp.split(codes, 2, -2)
    packed = rearrange(first | second << 4, "... n b o -> ... (n b) o")
    return Quantized(packed, _in_8_bits(scales) if double else scales, levels, w.dtype)


def from_blocks(
    codes: Int8[Array, "*l i o"] | UInt8[Array, "*l i o"],
    scales: Float[Array, "*l n o"],
    dtype: DTypeLike,
) -> Quantized:
    """A weight that was quantised elsewhere: code · scale, with codes of 8 bits, or of 4, two to a
    byte as here, that stand for −8 … 7.
    """
    if codes.dtype == jnp.int8:
        return Quantized(codes, scales, None, jnp.dtype(dtype))
    return Quantized(codes, 8 * scales, tuple(k / 8 for k in range(-8, 8)), jnp.dtype(dtype))


def like(q: Quantized, w: Float[Array, "*l i o"]) -> Quantized:
    """Another weight quantised as this one is."""
    block, double = q.shape[-2] // q.blocks, isinstance(q.scales, Scales)
    w = w.astype(q.dtype)
    if q.levels is not None:
        return by_levels(w, q.levels, block, double=double)
    return (int8 if jnp.issubdtype(q.codes.dtype, jnp.integer) else fp8)(w, block)


def _scaled(
    w: Float[Array, "*l i o"], block: int
) -> tuple[Float[Array, "*l n b o"], Float[Array, "*l n o"]]:
    """Blocks of every column, each divided by its largest magnitude, and these."""
    if block < 1 or w.shape[-2] % block:
        raise ValueError(f"expected blocks that divide {w.shape[-2]} inputs, got {block}")
    blocks = rearrange(w.astype(jnp.float32), "... (n b) o -> ... n b o", b=block)
    top = jnp.abs(blocks).max(-2)
    return blocks / jnp.where(top > 0, top, 1)[..., None, :], top


def _in_8_bits(scales: Float[Array, "*l n o"]) -> Scales:
    offset = scales.mean((-2, -1))
    flat = (scales - offset[..., None, None]).reshape(*scales.shape[:-2], -1)
    groups = _in_groups(flat)
    outer = jnp.abs(groups).max(-1) / 127
    codes = jnp.round(groups / jnp.where(outer > 0, outer, 1)[..., None]).astype(jnp.int8)
    codes = codes.reshape(*flat.shape[:-1], -1)[..., : flat.shape[-1]]
    return Scales(codes.reshape(scales.shape), outer, offset)


def _in_groups(x: Float[Array, "*l x"]) -> Float[Array, "*l m g"]:
    """In groups of `OUTER`, the last filled up with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % OUTER)]
    return rearrange(jnp.pad(x, padding), "... (m g) -> ... m g", g=OUTER)
