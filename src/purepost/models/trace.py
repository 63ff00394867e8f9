"""What a decoder computes on its way: the stream after its layers, and what their attention is made
of. Only what is asked for is kept.

Layers are counted from 0; −1 is the last.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ..types import KeyArray, Rows
from .block import finish, norm, project
from .config import Config
from .decoder import Decoder, Unembed
from .layers import soft_cap
from .settings import Setting, layer_settings

LayerPairs = Sequence[tuple[int, int]]  # (the student's layer, the teacher's)


class Heads(eqx.Module):
    """What one layer's attention is made of: queries and keys, rotated, and values."""

    queries: Float[Array, "b t h k"]  # scaled
    keys: Float[Array, "b t n k"]
    values: Float[Array, "b t n k"]
    window: int | None = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)

    @property
    def relations(self) -> "Heads":
        """The heads whose maps are those of values with values: softmax(v vᵀ/√k).

        Source: Wang et al., MiniLM, 2002.10957, eq. 8.
        """
        scaled = self.values * jnp.asarray(self.values.shape[-1] ** -0.5, self.values.dtype)
        return Heads(scaled, self.values, self.values, self.window, None)

    def log_maps(
        self, rows: Rows, queries: Float[Array, "b q h k"], index: Int[Array, "b q"]
    ) -> Float[Array, "b h q t"]:
        """The logarithms of the attention of some of the queries, those of the tokens `index`, to
        every token of their row; −∞ where one does not see the other.
        """
        b, q, h, width = queries.shape
        n = self.keys.shape[2]
        queries = queries.reshape(b, q, n, h // n, width)
        scores = jnp.einsum(
            "bqnmk,btnk->bnmqt", queries, self.keys, preferred_element_type=jnp.float32
        )
        scores = soft_cap(scores, self.softcap).reshape(b, h, q, -1)
        seen = _seen(rows, index, self.window)[:, None]
        return jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf))


def _seen(rows: Rows, index: Int[Array, "b q"], window: int | None) -> Bool[Array, "b q t"]:
    """Which tokens the tokens `index` see, as `layers.visible` has it."""
    i, j = index[..., None], jnp.arange(rows.end.shape[1], dtype=index.dtype)
    seen = (j <= i) & (i < rows.end[:, None])
    if window is not None:
        depth = jnp.take_along_axis(rows.positions, index, 1)
        seen &= depth[..., None] - rows.positions[:, None] < window
    return seen | (i == j)


class Trace(eqx.Module):
    """A decoder's hidden states after its last norm, and of the layers asked for, in that order,
    the stream after each and its heads. It stands for the decoder where the same rows are scored:
    `score(trace, rows)`.
    """

    hidden: Float[Array, "b t d"]
    states: tuple[Float[Array, "b t d"], ...]
    heads: tuple[Heads, ...]
    unembed: Unembed

    def __call__(
        self, rows: Rows, *, key: KeyArray | None = None
    ) -> tuple[Float[Array, "b t d"], None]:
        """The hidden states that are at hand."""
        return self.hidden, None


def layers_of(config: Config, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers counted from 0. Error: one that the model does not have."""
    count = config.num_layers
    for layer in layers:
        if not -count <= layer < count:
            raise ValueError(f"expected layers from {-count} to {count - 1}, got {layer}")
    return tuple(layer % count for layer in layers)


def trace(
    model: Decoder,
    rows: Rows,
    *,
    states: Sequence[int] = (),
    heads: Sequence[int] = (),
    key: KeyArray | None = None,
) -> Trace:
    """The model on the rows, with the stream after the layers `states` and the heads of the layers
    `heads`. `key` turns adapter dropout on. Errors: a layer that there is not; a model whose layers
    are several stacks.
    """
    config, blocks = model.config, model.one_stack
    states, heads = layers_of(config, states), layers_of(config, heads)
    settings, setting_of = layer_settings(config, rows.positions)
    layer = _layer(model, rows, setting_of, key)

    def step(carry: Any, inputs: Any) -> tuple[Any, None]:
        (x, streams, parts), (of_layer, (state_slot, heads_slot)) = carry, inputs
        x, new = layer(x, of_layer)
        parts = jax.tree.map(partial(_put, heads_slot), parts, new)
        return (x, _put(state_slot, streams, x), parts), None

    def room(layers: Sequence[int], *shape: int) -> Float[Array, "n *s"]:
        return jnp.zeros((len(set(layers)), *rows.tokens.shape, *shape), x.dtype)

    x, h, n = model.lookup(rows.tokens), config.num_heads, config.num_kv_heads
    parts = tuple(room(heads, m, config.head_dim) for m in (h, n, n))
    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    slots = tuple(_slots(layers, config.num_layers) for layers in (states, heads))
    (x, streams, parts), _ = jax.lax.scan(
        step,
        (x, room(states, config.hidden_size), parts),
        ((blocks, indices, settings, model.given(rows.tokens, x)), slots),
    )
    state_place, heads_place = (sorted(set(layers)).index for layers in (states, heads))

    def found(i: int) -> Heads:
        q, k, v = (y[heads_place(i)] for y in parts)
        return Heads(q, k, v, config.layer_windows[i], config.attention_softcap)

    return Trace(
        norm(config, x, model.norm),
        tuple(streams[state_place(i)] for i in states),
        tuple(map(found, heads)),
        model.unembed,
    )


def _layer(
    model: Decoder, rows: Rows, setting_of: Callable[[Any], Setting], key: KeyArray | None
) -> Callable[[Float[Array, "b t d"], Any], tuple[Float[Array, "b t d"], Any]]:
    """One layer as the decoder has it, which also gives its queries, scaled, keys and values."""
    config = model.config
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    row_keys = None if key is None else jax.vmap(lambda i: jr.fold_in(key, i))(rows.ids)

    @model.remat
    def layer(x: Float[Array, "b t d"], inputs: Any) -> tuple[Float[Array, "b t d"], Any]:
        block, index, setting, told = inputs
        keys = None if row_keys is None else jax.vmap(lambda k: jr.fold_in(k, index))(row_keys)
        window, angles = setting_of(setting)
        q, k, v = project(block, config, x, angles, keys)
        mixed = model.attend(q, k, v, rows, window, scale=scale, softcap=config.attention_softcap)
        x, _ = finish(block, config, x, mixed, keys, told)
        return x, (q * jnp.asarray(scale, q.dtype), k, v)

    return layer


def _slots(layers: Sequence[int], count: int) -> Int[Array, " l"]:
    """Where each of `count` layers is kept: its rank among those asked for, past the end if it is
    not.
    """
    chosen = sorted(set(layers))
    at = [chosen.index(i) if i in chosen else len(chosen) for i in range(count)]
    return jnp.asarray(at, jnp.int32)


def _put(
    slot: Int[Array, ""], kept: Float[Array, "n *s"], new: Float[Array, "*s"]
) -> Float[Array, "n *s"]:
    return kept.at[slot].set(new, mode="drop") if kept.shape[0] else kept


def spread(student: Config, teacher: Config) -> LayerPairs:
    """Every layer of the student, each with the teacher's layer as far up, the last with the last.

    Source: Jiao et al., TinyBERT, 1909.10351, §3.1 (uniform).
    """
    m, n = student.num_layers, teacher.num_layers
    return [(i, -(-(i + 1) * n // m) - 1) for i in range(m)]


def expect_pairs(layers: LayerPairs | None) -> None:
    """Raise ValueError for an empty list of pairs."""
    if layers is not None and not layers:
        raise ValueError("expected at least one pair of layers, (the student's, the teacher's)")


def expect_one_vocabulary(student: Decoder, teacher: Decoder) -> None:
    """Raise ValueError where the two do not read the same tokens."""
    sizes = student.config.vocab_size, teacher.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"expected a teacher of the student's {sizes[0]} tokens, got {sizes[1]}; restrict the "
            "larger vocabulary first: models.vocabulary.restrict"
        )
