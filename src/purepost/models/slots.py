"""Decoding rows of unlike lengths side by side: a slot holds the keys and values of one row, prompt
and completion alike, and rows move through it one after another.
"""

from collections.abc import Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from .block import Block, finish, norm, project, queries
from .config import Config, Kind
from .decoder import Decoder
from .layers import soft_cap


class SlotLayer(eqx.Module):
    """Keys (rotated) and values of one layer; keys by feature, as in `cache.Layer`.

    As int8 they are multiples of a scale that each token's key and value has in each head.
    """

    k: Num[Array, "s n k t"]
    v: Num[Array, "s n t k"]
    k_scale: Float[Array, "s n t"] | None = None
    v_scale: Float[Array, "s n t"] | None = None

    def put(
        self, at: Int[Array, "s c"], k: Float[Array, "s c n k"], v: Float[Array, "s c n k"]
    ) -> "SlotLayer":
        """The layer with these keys and values as tokens number `at`; beyond its room: nowhere."""
        row = jnp.arange(at.shape[0])[:, None]
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is not None and v_scale is not None:
            (k, k_new), (v, v_new) = _quantize(k), _quantize(v)
            k_scale = k_scale.at[row, :, at].set(k_new)
            v_scale = v_scale.at[row, :, at].set(v_new)
        k_all, v_all = self.k.at[row, :, :, at].set(k), self.v.at[row, :, at].set(v)
        return SlotLayer(k_all, v_all, k_scale, v_scale)

    def resize(self, room: int) -> "SlotLayer":
        """The layer with room for so many tokens."""

        def fit(x: Num[Array, "s *n"], axis: int) -> Array:
            more = [(0, 0)] * x.ndim
            more[axis] = (0, max(0, room - x.shape[axis]))
            return jax.lax.slice_in_dim(jnp.pad(x, more), 0, room, axis=axis)

        scales = [None if x is None else fit(x, 2) for x in (self.k_scale, self.v_scale)]
        return SlotLayer(fit(self.k, 3), fit(self.v, 2), *scales)


class Slots(eqx.Module):
    """The keys and values of s rows. How many tokens of each count is for the owner to know: what
    lies behind them nobody sees, and it is overwritten.

    Every step reads all of the room, full or empty: it should be little more than the longest row.
    """

    layers: list[SlotLayer]  # those that have keys and values of their own

    @property
    def room(self) -> int:
        """Tokens that a slot can hold."""
        return self.layers[0].v.shape[2]


def empty_slots(config: Config, slots: int, room: int, dtype: DTypeLike) -> Slots:
    """Slots of `room` tokens each. int8 makes them a quarter the size of float32 ones, and keys
    and values off by at most a 254th of the largest of their token and head.
    """
    scaled = jnp.dtype(dtype) == jnp.int8

    def layer(kind: Kind) -> SlotLayer:
        heads, width = (slots, kind.kv_heads), kind.head_dim
        k, v = jnp.zeros((*heads, width, room), dtype), jnp.zeros((*heads, room, width), dtype)
        scales = [jnp.zeros((*heads, room)) if scaled else None for _ in range(2)]
        return SlotLayer(k, v, *scales)

    return Slots([layer(kind) for kind in config.kinds if kind.source is None])


def resize(slots: Slots, room: int) -> Slots:
    """The slots with room for so many tokens."""
    return Slots([layer.resize(room) for layer in slots.layers])


def read_slot(slots: Slots, slot: Int[Array, ""], room: int) -> Slots:
    """The first `room` tokens of one slot, as slots of their own."""
    return resize(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), slots), room)


def write_slot(slots: Slots, slot: Int[Array, ""], part: Slots) -> Slots:
    """The slots with the first tokens of one of them as `read_slot` gave them."""

    def write(x: Num[Array, "s *n"], y: Num[Array, "1 *m"]) -> Num[Array, "s *n"]:
        return jax.lax.dynamic_update_slice(x, y, (slot, *[0] * (x.ndim - 1)))

    return jax.tree.map(write, slots, part)


def extend(
    model: Decoder,
    blocks: Sequence[Block],
    slots: Slots,
    tokens: Int[Array, "s c"],
    start: Int[Array, " s"],
) -> tuple[Float[Array, "s c d"], Slots]:
    """Hidden states of c more tokens of every row, the first of them its token number `start`; and
    the slots with their keys and values in them.

    One token a row is decoding, several are a piece of a prompt, or guesses to be checked. Rows
    that have fewer are filled up with any: what follows overwrites them. A row that starts at
    `slots.room` writes nothing. `blocks` are `cache.unstack(model)`.
    """
    config = model.config
    at = start[:, None] + jnp.arange(tokens.shape[1], dtype=start.dtype)
    x = model.lookup(tokens)
    turned = {w: config.rope(w).angles(at) for w in set(config.layer_windows)}
    given = model.given(tokens, x)
    kept: list[tuple[SlotLayer, Array, Array]] = []
    for i, (block, kind) in enumerate(zip(blocks, config.kinds, strict=True)):
        window = config.layer_windows[i]
        if kind.source is None:
            q, k, v = project(block, config, x, turned[window])
            layer = slots.layers[i].put(at, k, v)
            kept.append((layer, k, v))
        else:
            q = queries(block, config, x, turned[window])
            layer, k, v = kept[kind.source]
        mixed = _attend(config, q, k, v, layer, start, window)
        x, _ = finish(block, config, x, mixed, given=None if given is None else given[i])
    return norm(config, x, model.norm), Slots([layer for layer, _, _ in kept])


def _attend(
    config: Config,
    q: Float[Array, "s c h k"],
    k: Float[Array, "s c n k"],
    v: Float[Array, "s c n k"],
    layer: SlotLayer,
    start: Int[Array, " s"],
    window: int | None,
) -> Float[Array, "s c h k"]:
    """Softmax attention of each of c new tokens over those of its slot before number `start`, and
    over the new ones up to itself.
    """
    (s, c, h, width), n, dtype = q.shape, k.shape[2], q.dtype
    old_k, old_v, m = layer.k.astype(dtype), layer.v.astype(dtype), h // n
    scale = width**-0.5 if config.query_scale is None else config.query_scale
    q = (q * jnp.asarray(scale, dtype)).reshape(s, c, n, m, width)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    old = product("scnmk,snkt->sncmt", q, old_k)
    new = product("scnmk,sdnk->sncmd", q, k)
    if layer.k_scale is not None:
        old *= layer.k_scale[:, :, None, None]
    old, new = (soft_cap(x, config.attention_softcap) for x in (old, new))
    t, i = jnp.arange(old.shape[-1]), jnp.arange(c)
    before, upto = t < start[:, None, None], i <= i[:, None]  # s 1 t, c c'
    if window is not None:
        before &= start[:, None, None] + i[:, None] - t < window
        upto &= i[:, None] - i < window
    old = jnp.where(before[:, None, :, None], old, -jnp.inf)
    new = jnp.where(upto[:, None], new, -jnp.inf)
    top = jnp.maximum(old.max(-1), new.max(-1))[..., None]
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = (old.sum(-1) + new.sum(-1))[..., None]
    if layer.v_scale is not None:
        old *= layer.v_scale[:, :, None, None]
    old, new = old.astype(dtype), new.astype(dtype)
    mixed = product("sncmt,sntk->sncmk", old, old_v) + product("sncmd,sdnk->sncmk", new, v)
    mixed = (mixed / total).astype(dtype)
    return mixed.swapaxes(1, 2).reshape(s, c, h, width)


def _quantize(
    x: Float[Array, "s c n k"],
) -> tuple[Num[Array, "s c n k"], Float[Array, "s c n"]]:
    """(int8, scale): x as multiples of a 127th of the largest of each token and head."""
    scale = jnp.abs(x).max(-1).astype(jnp.float32) / 127
    steps = x.astype(jnp.float32) / jnp.where(scale > 0, scale, 1.0)[..., None]
    return jnp.round(steps).astype(jnp.int8), scale
