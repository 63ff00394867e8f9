"""Decoding one token at a time: a prompt's keys and values are held once, its branches hold only
their own.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..types import causal_rows
from ..weights import is_kind, tile
from .block import Block, finish, norm, project, queries
from .config import Config
from .decoder import Decoder
from .layers import soft_cap


class Layer(eqx.Module):
    """Keys (rotated) and values of one layer: of p prompts, and of their branches, c = p·n·g.

    Keys are held by feature, so that scores add up whole rows of tokens. Branches lie on one axis:
    for products over several XLA would copy them at every step.
    """

    prefix_k: Float[Array, "p n k s"]
    prefix_v: Float[Array, "p n s k"]
    branch_k: Float[Array, "c k t"]
    branch_v: Float[Array, "c t k"]


class Cache(eqx.Module):
    """What decoding continues from."""

    layers: list[Layer]  # those that have keys and values of their own
    lengths: Int[Array, " p"]  # tokens of each prompt


def prefill(
    model: Decoder, prompts: Int[Array, "p s"], lengths: Int[Array, " p"], group: int, slots: int
) -> tuple[Float[Array, "p d"], Cache]:
    """Hidden states of the prompts' last tokens, and a cache for `group` branches of `slots`
    tokens each.
    """
    hidden, kv = model(causal_rows(prompts, lengths))
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]

    def layer(k: Float[Array, "p s n k"], v: Float[Array, "p s n k"]) -> Layer:
        p, _, n, width = k.shape
        empty = jnp.zeros((p * n * group, slots, width), hidden.dtype)
        return Layer(k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), empty.swapaxes(1, 2), empty)

    return last, Cache([layer(k, v) for k, v in kv.layers], lengths)


def grow(cache: Cache, slots: int) -> Cache:
    """The cache with room for `slots` tokens in each branch."""

    def widen(x: Float[Array, "*s"], axis: int) -> Array:
        more = [(0, 0)] * x.ndim
        more[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, more)

    layers = [
        Layer(x.prefix_k, x.prefix_v, widen(x.branch_k, 2), widen(x.branch_v, 1))
        for x in cache.layers
    ]
    return Cache(layers, cache.lengths)


def unstack(model: Decoder) -> list[Block]:
    """The layers one by one, laid out for decoding: it reads them in place, where a scan would copy
    each.
    """
    lay_out = tile if jax.default_backend() == "cpu" else lambda w: w

    def layer(stack: Block, i: int) -> Block:
        block = jax.tree.map(lambda x: x[i], stack)
        raw = lambda x: not is_kind(x) and x.ndim == 2  # noqa: E731
        return jax.tree.map(lambda x: lay_out(x) if raw(x) else x, block, is_leaf=is_kind)

    stacks = model.layers if isinstance(model.layers, dict) else {0: model.layers}
    return [layer(stacks[run.start], i) for run in model.config.runs for i in range(len(run))]


def _attend(
    config: Config,
    q: Float[Array, "p g n m k"],
    layer: Layer,
    lengths: Int[Array, " p"],
    step: Int[Array, ""],
    window: int | None,
) -> Float[Array, "p g n m k"]:
    """Softmax attention of one query per branch over its prompt and its own tokens up to `step`."""
    p, g, n, m, width = q.shape
    scale = width**-0.5 if config.query_scale is None else config.query_scale
    q = (q * jnp.asarray(scale, q.dtype)).transpose(0, 2, 1, 3, 4)  # p n g m k
    flat = q.reshape(p, n, g * m, width)
    before = jnp.einsum(
        "pnqk,pnks->pnqs", flat, layer.prefix_k, preferred_element_type=jnp.float32
    ).reshape(p, n, g, m, -1)
    own = _products(q.reshape(-1, m, width), layer.branch_k).reshape(p, n, g, m, -1)
    before, own = (soft_cap(x, config.attention_softcap) for x in (before, own))
    s, t = jnp.arange(before.shape[-1]), jnp.arange(own.shape[-1])
    real, past = s < lengths[:, None], t <= step
    if window is not None:
        real &= lengths[:, None] + step - s < window
        past &= step - t < window
    before = jnp.where(real[:, None, None, None], before, -jnp.inf)
    own = jnp.where(past, own, -jnp.inf)
    top = jnp.maximum(before.max(-1), own.max(-1))[..., None]
    before, own = jnp.exp(before - top), jnp.exp(own - top)
    total = (before.sum(-1) + own.sum(-1))[..., None]
    dtype = layer.prefix_v.dtype
    mixed = jnp.einsum(
        "pnqs,pnsk->pnqk",
        before.reshape(p, n, g * m, -1).astype(dtype),
        layer.prefix_v,
        preferred_element_type=jnp.float32,
    ).reshape(p, n, g, m, width)
    own = own.reshape(p * n * g, m, -1).astype(dtype)
    mixed += _products(own, layer.branch_v).reshape(p, n, g, m, width)
    return (mixed / total).astype(dtype).transpose(0, 2, 1, 3, 4)


def _products(x: Float[Array, "c m i"], y: Float[Array, "c i o"]) -> Float[Array, "c m o"]:
    return jnp.einsum("cmi,cio->cmo", x, y, preferred_element_type=jnp.float32)


def decode(
    model: Decoder,
    blocks: Sequence[Block],
    cache: Cache,
    tokens: Int[Array, "p g"],
    step: Int[Array, ""],
) -> tuple[Float[Array, "p g d"], Cache]:
    """Hidden states of the branches' tokens number `step` (from 0), and the cache with their keys
    and values in it. `step` is below t: past the end it would overwrite the last.
    """
    put = jax.lax.dynamic_update_slice_in_dim
    config = model.config
    x = model.lookup(tokens)
    positions = jnp.broadcast_to(cache.lengths[:, None] + step, tokens.shape)
    turned = {w: config.rope(w).angles(positions) for w in set(config.layer_windows)}
    given = model.given(tokens, x)
    layers: list[Layer] = []
    for i, (block, kind) in enumerate(zip(blocks, config.kinds, strict=True)):
        window = config.layer_windows[i]
        if kind.source is None:
            q, k, v = project(block, config, x, turned[window])
            k, v = (y.swapaxes(1, 2).reshape(-1, y.shape[-1]) for y in (k, v))  # c k
            layer = cache.layers[i]
            layer = Layer(
                layer.prefix_k,
                layer.prefix_v,
                put(layer.branch_k, k[..., None], step, axis=2),
                put(layer.branch_v, v[:, None], step, axis=1),
            )
            layers.append(layer)
        else:
            q, layer = queries(block, config, x, turned[window]), layers[kind.source]
        p, g, h, width = q.shape
        q = q.reshape(p, g, kind.kv_heads, h // kind.kv_heads, width)
        mixed = _attend(config, q, layer, cache.lengths, step, window).reshape(p, g, h, width)
        x, _ = finish(block, config, x, mixed, given=None if given is None else given[i])
    return norm(config, x, model.norm), Cache(layers, cache.lengths)
