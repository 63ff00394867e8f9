"""Attention over forest rows as Pallas kernels: queries against one block of keys after another,
with a running maximum and sum; the backward pass computes the scores again.

p_ij = exp(s_ij − lse_i)    ∂s_ij = p_ij (∂o_i·v_j − ∂o_i·o_i)

Source: Dao, FlashAttention-2, 2307.08691, §3.1. Differs from the paper: blocks that see nothing of
each other are left out, by lists made of the rows beforehand.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton
from jaxtyping import Array, Bool, Float, Int

from ..types import Rows
from .layers import soft_cap
from .remat import ATTENTION

LEAST = -1e30  # a score that loses to any other, and whose differences are finite


class Seen(NamedTuple):
    """Who sees whom: token i sees j iff j ≤ i < end[j] and depth[j] > floor[i], and itself."""

    floor: Int[Array, "b t 1"]  # a token sees what is deeper on its path
    end: Int[Array, "b 1 t"]
    depth: Int[Array, "b 1 t"]
    # How many blocks there are to visit, then their numbers: of keys for a block of queries, and
    # of queries for a block of keys.
    key_blocks: Int[Array, "b x 1 1+y"]
    query_blocks: Int[Array, "b y 1 1+x"]


@dataclasses.dataclass(frozen=True)
class FlashAttention:
    """Softmax attention over forest rows as kernels for a GPU or TPU: a block of queries against
    one block of keys after another, forward and backward, and no scores in memory.

    Blocks that see nothing of each other are not computed: a branch costs its trunk and itself,
    whatever other branches the row holds. Blocks are powers of 2, in tokens: on a GPU at least 16,
    on a TPU 128. For a TPU: `FlashAttention(128, 128, tpu.CompilerParams())`; one row's keys and
    values of a head, and its queries of all that share them, must fit into its VMEM.
    """

    query_block: int = 64
    key_block: int = 64
    # Of 4 warps, ptxas for sm_90 spills next to no registers up to heads of 128 in bfloat16; wider
    # ones want 8.
    compiler: triton.CompilerParams | tpu.CompilerParams = triton.CompilerParams(
        num_warps=4, num_stages=2
    )
    interpret: bool = False  # run as plain JAX on any device, for tests

    def __post_init__(self) -> None:
        for name in ("query_block", "key_block"):
            size = self.__dict__[name]
            if size < 1 or size & (size - 1):
                raise ValueError(f"expected {name} to be a power of 2, got {size}")

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
        """As `layers.attention`."""
        t, width = q.shape[1], q.shape[-1]
        scale = width**-0.5 if scale is None else scale
        room = -t % max(self.query_block, self.key_block)
        extra = max(16, pl.next_power_of_2(width)) - width  # zeros change no score

        def heads_first(x: Float[Array, "b t m k"]) -> Float[Array, "b m s w"]:
            return jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, room), (0, extra)])

        q, k, v = map(heads_first, (q * jnp.asarray(scale, q.dtype), k, v))
        seen = _seen(rows, window, room, self.query_block, self.key_block)
        out: Array = _flash(self, softcap, q, k, v, seen)
        return out.swapaxes(1, 2)[:, :t, :, :width]

    def call(self, kernel: Any, **options: Any) -> Any:
        """The kernel as a function of arrays."""
        return pl.pallas_call(
            kernel, compiler_params=self.compiler, interpret=self.interpret, **options
        )

    def list_spec(self, blocks: Int[Array, "b x 1 y"]) -> pl.BlockSpec:
        """The list of a program's own block; for a TPU in the memory of single numbers."""
        space = tpu.SMEM if isinstance(self.compiler, tpu.CompilerParams) else None
        shape = (None, None, 1, blocks.shape[3])
        return pl.BlockSpec(shape, lambda i, h, b: (b, i, 0, 0), memory_space=space)


def _seen(
    rows: Rows, window: int | Int[Array, ""] | None, room: int, query_block: int, key_block: int
) -> Seen:
    """Padded by `room` tokens that see themselves only. Two blocks meet if they overlap, or if the
    keys come first, some of them last until the first query, and some are deep enough for some.
    """
    end, depth = (jnp.pad(x, [(0, 0), (0, room)]) for x in (rows.end, rows.positions))
    floor = jnp.full_like(depth, -1) if window is None else depth - window
    b, t = end.shape
    blocks = lambda x, size: x.reshape(b, t // size, size)  # noqa: E731
    first_query = jnp.arange(0, t, query_block, dtype=jnp.int32)[None, :, None]
    first_key = jnp.arange(0, t, key_block, dtype=jnp.int32)[None, None]
    before = first_key < first_query + query_block
    overlap = before & (first_query < first_key + key_block)
    last_end, deepest = (blocks(x, key_block).max(-1)[:, None] for x in (end, depth))
    lowest = blocks(floor, query_block).min(-1)[..., None]
    meet = overlap | (before & (last_end > first_query) & (deepest > lowest))
    return Seen(
        floor[..., None],
        end[:, None],
        depth[:, None],
        _listed(meet),
        _listed(meet.swapaxes(1, 2)),
    )


def _listed(meet: Bool[Array, "b x y"]) -> Int[Array, "b x 1 1+y"]:
    """Of each x, how many y it meets, and their numbers (then those that it does not meet)."""
    count = meet.sum(-1, keepdims=True, dtype=jnp.int32)
    order = jnp.argsort(~meet, axis=-1).astype(jnp.int32)
    return jnp.concatenate([count, order], -1)[:, :, None]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "x y"]:
    """The product of two matrices along one axis of each, summed in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _visible(
    first_query: Int[Array, ""],
    first_key: Int[Array, ""],
    floor: Int[Array, "x 1"],
    end: Int[Array, "1 y"],
    depth: Int[Array, "1 y"],
) -> Bool[Array, "x y"]:
    """Which keys of a block the queries of a block see."""
    shape = (floor.shape[0], end.shape[1])
    i = first_query + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    j = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return ((j <= i) & (i < end) & (depth > floor)) | (i == j)


def _forward_kernel(
    q_ref: Any,  # [x, w]
    k_ref: Any,  # [t, w]
    v_ref: Any,  # [t, w]
    floor_ref: Any,  # [x, 1]
    end_ref: Any,  # [1, t]
    depth_ref: Any,  # [1, t]
    blocks_ref: Any,  # [1, 1 + y]
    out_ref: Any,  # [x, w]
    normalizer_ref: Any,  # [x, 1]
    *,
    size: int,
    softcap: float | None,
) -> None:
    """One block of queries: their outputs, and the logarithms of their sums."""
    q, floor = q_ref[...], floor_ref[...]
    first_query = pl.program_id(0) * q.shape[0]

    def step(n: Int[Array, ""], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = state
        first_key = pl.multiple_of(blocks_ref[0, n + 1] * size, size)
        at = pl.ds(first_key, size)
        seen = _visible(first_query, first_key, floor, end_ref[:, at], depth_ref[:, at])
        scores = jnp.where(seen, soft_cap(_dot(q, k_ref[at, :], (1, 1)), softcap), LEAST)
        higher = jnp.maximum(top, scores.max(1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
        fade = jnp.exp(top - higher)
        v = v_ref[at, :]
        out = fade * out + _dot(weights.astype(v.dtype), v, (1, 0))
        return out, higher, fade * total + weights.sum(1, keepdims=True)

    column = (q.shape[0], 1)
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(column, LEAST), jnp.zeros(column)
    out, top, total = jax.lax.fori_loop(0, blocks_ref[0, 0], step, start)
    out_ref[...] = (out / total).astype(out_ref.dtype)
    normalizer_ref[...] = top + jnp.log(total)


def _weights_and_slopes(
    q: Float[Array, "x w"],
    k: Float[Array, "y w"],
    v: Float[Array, "y w"],
    d_out: Float[Array, "x w"],
    normalizer: Float[Array, "x 1"],
    mean: Float[Array, "x 1"],
    seen: Bool[Array, "x y"],
    softcap: float | None,
) -> tuple[Float[Array, "x y"], Float[Array, "x y"]]:
    """The softmax of a block of scores p, and the gradient of the scores before their cap:
    p · (∂L/∂p − Σ p ∂L/∂p), times 1 − (score / cap)².
    """
    scores = soft_cap(_dot(q, k, (1, 1)), softcap)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - normalizer, 0.0)), 0.0)
    slopes = weights * (_dot(d_out, v, (1, 1)) - mean)
    if softcap is not None:
        slopes *= 1 - (scores / softcap) ** 2
    return weights, slopes


def _queries_kernel(
    q_ref: Any,  # [x, w]
    k_ref: Any,  # [t, w]
    v_ref: Any,  # [t, w]
    floor_ref: Any,  # [x, 1]
    end_ref: Any,  # [1, t]
    depth_ref: Any,  # [1, t]
    blocks_ref: Any,  # [1, 1 + y]
    d_out_ref: Any,  # [x, w]
    normalizer_ref: Any,  # [x, 1]
    mean_ref: Any,  # [x, 1]
    dq_ref: Any,  # [x, w]
    *,
    size: int,
    softcap: float | None,
) -> None:
    """The gradient of one block of queries."""
    q, floor, d_out = q_ref[...], floor_ref[...], d_out_ref[...]
    normalizer, mean = normalizer_ref[...], mean_ref[...]
    first_query = pl.program_id(0) * q.shape[0]

    def step(n: Int[Array, ""], dq: Float[Array, "x w"]) -> Float[Array, "x w"]:
        first_key = pl.multiple_of(blocks_ref[0, n + 1] * size, size)
        at = pl.ds(first_key, size)
        k, v = k_ref[at, :], v_ref[at, :]
        seen = _visible(first_query, first_key, floor, end_ref[:, at], depth_ref[:, at])
        _, slopes = _weights_and_slopes(q, k, v, d_out, normalizer, mean, seen, softcap)
        return dq + _dot(slopes.astype(k.dtype), k, (1, 0))

    dq = jax.lax.fori_loop(0, blocks_ref[0, 0], step, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _keys_kernel(
    q_ref: Any,  # [m, t, w]
    k_ref: Any,  # [y, w]
    v_ref: Any,  # [y, w]
    floor_ref: Any,  # [t, 1]
    end_ref: Any,  # [1, y]
    depth_ref: Any,  # [1, y]
    blocks_ref: Any,  # [1, 1 + x]
    d_out_ref: Any,  # [m, t, w]
    normalizer_ref: Any,  # [m, t, 1]
    mean_ref: Any,  # [m, t, 1]
    dk_ref: Any,  # [y, w]
    dv_ref: Any,  # [y, w]
    *,
    size: int,
    softcap: float | None,
) -> None:
    """The gradients of one block of keys and values, over the query heads that share them."""
    k, v, end, depth = k_ref[...], v_ref[...], end_ref[...], depth_ref[...]
    first_key = pl.program_id(0) * k.shape[0]
    count = blocks_ref[0, 0]

    def step(n: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = state
        head, block = jax.lax.div(n, count), jax.lax.rem(n, count)
        first_query = pl.multiple_of(blocks_ref[0, block + 1] * size, size)
        at = pl.ds(first_query, size)
        q, d_out = q_ref[head, at, :], d_out_ref[head, at, :]
        normalizer, mean = normalizer_ref[head, at, :], mean_ref[head, at, :]
        seen = _visible(first_query, first_key, floor_ref[at, :], end, depth)
        weights, slopes = _weights_and_slopes(q, k, v, d_out, normalizer, mean, seen, softcap)
        dv += _dot(weights.astype(d_out.dtype), d_out, (0, 0))
        return dk + _dot(slopes.astype(q.dtype), q, (0, 0)), dv

    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[0] * count, step, (zero, zero))
    dk_ref[...] = dk.astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


Specs = tuple[list[pl.BlockSpec], pl.BlockSpec, pl.BlockSpec]


def _of_queries(q: Float[Array, "b h t w"], k: Float[Array, "b n t w"], size: int) -> Specs:
    """What a program for (block of queries, query head, row) has of (q, k, v, *seen), of an array
    like the queries, and of one with a number for each query.
    """
    t, width = q.shape[2:]
    group = q.shape[1] // k.shape[1]
    mine = pl.BlockSpec((None, None, size, width), lambda i, h, b: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, t, width), lambda i, h, b: (b, jax.lax.div(h, group), 0, 0))
    floor = pl.BlockSpec((None, size, 1), lambda i, h, b: (b, i, 0))
    row = pl.BlockSpec((None, 1, t), lambda i, h, b: (b, 0, 0))
    column = pl.BlockSpec((None, None, size, 1), lambda i, h, b: (b, h, i, 0))
    return [mine, keys, keys, floor, row, row], mine, column


def _of_keys(q: Float[Array, "b h t w"], k: Float[Array, "b n t w"], size: int) -> Specs:
    """What a program for (block of keys, key head, row) has, in the same order."""
    t, width = q.shape[2:]
    group = q.shape[1] // k.shape[1]
    queries = pl.BlockSpec((None, group, t, width), lambda i, n, b: (b, n, 0, 0))
    mine = pl.BlockSpec((None, None, size, width), lambda i, n, b: (b, n, i, 0))
    floor = pl.BlockSpec((None, t, 1), lambda i, n, b: (b, 0, 0))
    row = pl.BlockSpec((None, 1, size), lambda i, n, b: (b, 0, i))
    column = pl.BlockSpec((None, group, t, 1), lambda i, n, b: (b, n, 0, 0))
    return [queries, mine, mine, floor, row, row], queries, column


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(
    flash: FlashAttention,
    softcap: float | None,
    q: Float[Array, "b h t w"],
    k: Float[Array, "b n t w"],
    v: Float[Array, "b n t w"],
    seen: Seen,
) -> Float[Array, "b h t w"]:
    return _forward(flash, softcap, q, k, v, seen)[0]


def _forward(
    flash: FlashAttention,
    softcap: float | None,
    q: Float[Array, "b h t w"],
    k: Float[Array, "b n t w"],
    v: Float[Array, "b n t w"],
    seen: Seen,
) -> tuple[Float[Array, "b h t w"], Any]:
    b, h, t, _ = q.shape
    specs, queries, column = _of_queries(q, k, flash.query_block)
    found = flash.call(
        partial(_forward_kernel, size=flash.key_block, softcap=softcap),
        grid=(t // flash.query_block, h, b),
        in_specs=[*specs, flash.list_spec(seen.key_blocks)],
        out_specs=[queries, column],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((b, h, t, 1), jnp.float32),
        ],
    )(q, k, v, seen.floor, seen.end, seen.depth, seen.key_blocks)
    out, normalizer = (checkpoint_name(x, ATTENTION) for x in found)
    return out, (q, k, v, seen, out, normalizer)


def _backward(
    flash: FlashAttention, softcap: float | None, saved: Any, d_out: Float[Array, "b h t w"]
) -> tuple[Array, Array, Array, None]:
    q, k, v, seen, out, normalizer = saved
    b, h, t, _ = q.shape
    mean = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1, keepdims=True)
    shared = q, k, v, seen.floor, seen.end, seen.depth
    told = d_out, normalizer, mean
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    specs, queries, column = _of_queries(q, k, flash.query_block)
    dq = flash.call(
        partial(_queries_kernel, size=flash.key_block, softcap=softcap),
        grid=(t // flash.query_block, h, b),
        in_specs=[*specs, flash.list_spec(seen.key_blocks), queries, column, column],
        out_specs=queries,
        out_shape=like(q),
    )(*shared, seen.key_blocks, *told)
    specs, queries, column = _of_keys(q, k, flash.key_block)
    dk, dv = flash.call(
        partial(_keys_kernel, size=flash.query_block, softcap=softcap),
        grid=(t // flash.key_block, k.shape[1], b),
        in_specs=[*specs, flash.list_spec(seen.query_blocks), queries, column, column],
        out_specs=specs[1:3],
        out_shape=[like(k), like(v)],
    )(*shared, seen.query_blocks, *told)
    return dq, dk, dv, None


_flash.defvjp(_forward, _backward)
