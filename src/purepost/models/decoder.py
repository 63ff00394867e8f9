"""The decoder: embeddings, a scan over stacked layers, a norm, and a head.

Where layers differ in the shapes of their weights, there is a stack for each run of like ones.
"""

import dataclasses
import math
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from ..tree import named_key
from ..types import KeyArray, Rows, divide_rows
from ..weights import Weight, linear, lookup, transposed_linear
from .block import Block, finish, norm, project, queries
from .config import Config as Config
from .layer_inputs import LayerInput, LayerInputs
from .layers import MLP, Attention, AttentionFn, attention, soft_cap
from .moe import MoE, SideExperts
from .remat import Remat, dots
from .settings import layer_settings

T = TypeVar("T")

Stacked = Float[Array, "l b t n k"]
Stacks = tuple[Float[Array, "_ b t _ _"], ...]


class KV(eqx.Module):
    """Keys (rotated) and values of every layer that has its own, in the order of the row, stacked
    as the layers are; and of those with experts the router's probabilities.
    """

    k: Stacked | Stacks
    v: Stacked | Stacks
    router: Float[Array, "l b t e"] | None = None

    @property
    def layers(self) -> list[tuple[Float[Array, "b t _ _"], Float[Array, "b t _ _"]]]:
        """Keys and values layer by layer."""
        k, v = (x if isinstance(x, tuple) else (x,) for x in (self.k, self.v))
        return [pair for stack in zip(k, v, strict=True) for pair in zip(*stack, strict=True)]


class Unembed(eqx.Module):
    """The map from hidden states to logits."""

    weight: Weight  # [d, v]; tied: the embeddings, [v, d]
    tied: bool = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True, default=None)

    def __call__(self, hidden: Float[Array, "*s d"]) -> Float[Array, "*s v"]:
        """Logits, float32."""
        product = transposed_linear if self.tied else linear
        return soft_cap(product(hidden, self.weight).astype(jnp.float32), self.softcap)


class Decoder(eqx.Module):
    """A decoder-only transformer over forest rows."""

    embed: Any  # a weight [v, d] of any kind, mostly a raw array
    layers: Any  # a Block of all layers, stacked; several, if layers differ: {first layer: Block}
    norm: Float[Array, " d"]
    head: Weight | None  # [d, v]; None: the embeddings, transposed
    config: Config = eqx.field(static=True)
    layer_inputs: LayerInputs | None = None
    remat: Remat = eqx.field(static=True, default=dots)
    attend: AttentionFn = eqx.field(static=True, default=attention)

    def __call__(
        self, rows: Rows, *, key: KeyArray | None = None
    ) -> tuple[Float[Array, "b t d"], KV]:
        """Hidden states after the last norm, and every layer's keys and values.

        `key` turns adapter dropout on.
        """
        config = self.config
        x = self.lookup(rows.tokens)
        given = self.given(rows.tokens, x)
        keys = None if key is None else jax.vmap(lambda i: jr.fold_in(key, i))(rows.ids)
        if len(config.runs) == 1:
            every = range(config.num_layers)
            x, ((k, v), router) = _stack(self, every, self.layers, x, rows, keys, given)
            return norm(config, x, self.norm), KV(k, v, router)
        kept: dict[int, Any] = {}  # of each layer its keys and values
        stacks, routers = [], []
        for run in config.runs:
            source = config.kinds[run.start].source
            shared = None if source is None else kept[source]
            told = None if given is None else given[run.start : run.stop]
            blocks = self.layers[run.start]
            x, (own, router) = _stack(self, run, blocks, x, rows, keys, told, shared)
            if own is not None:
                kept |= zip(run, zip(*own, strict=True), strict=True)
                stacks.append(own)
            routers += [] if router is None else [router]
        k, v = zip(*stacks, strict=True)
        router = jnp.concatenate(routers) if routers else None
        return norm(config, x, self.norm), KV(k, v, router)

    @property
    def one_stack(self) -> Block:
        """All layers. Error: they are several stacks."""
        if isinstance(self.layers, dict):
            raise ValueError(
                f"expected a model whose layers are all of one kind, got a {self.config.family} of "
                f"{len(self.layers)} stacks; this works on one stack only"
            )
        return self.layers

    def given(
        self, tokens: Int[Array, "b *s"], x: Float[Array, "b *s d"]
    ) -> Float[Array, "l b *s p"] | None:
        """What each layer is told of the tokens, if the family does that; x: their embeddings."""
        if self.layer_inputs is None:
            return None
        return self.layer_inputs(tokens, x, self.config.norm_eps)

    def lookup(self, tokens: Int[Array, "b *s"]) -> Float[Array, "b *s d"]:
        """The embeddings of tokens, as the first layer reads them."""
        x, scale = divide_rows(lookup(self.embed, tokens)), self.config.embed_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    @property
    def unembed(self) -> "Unembed":
        """Hidden states → logits: a pytree of its own, so that a loss can differentiate just it."""
        weight = self.embed if self.head is None else self.head
        return Unembed(weight, self.head is None, self.config.final_softcap)


def _stack(
    model: Decoder,
    layers: range,
    blocks: Block,
    x: Float[Array, "b t d"],
    rows: Rows,
    keys: Key[Array, " b"] | None,
    given: Float[Array, "l b t p"] | None = None,
    shared: tuple[Float[Array, "b t n k"], Float[Array, "b t n k"]] | None = None,
) -> tuple[Float[Array, "b t d"], tuple[Any, Float[Array, "l b t e"] | None]]:
    """A stack of layers, one after another: the stream; their keys and values, if they have some of
    their own, and their routers' probabilities.
    """
    config = model.config
    settings, setting_of = layer_settings(config, rows.positions, layers)

    @model.remat
    def layer(x: Float[Array, "b t d"], inputs: tuple[Block, Int[Array, ""], PyTree, PyTree]):
        block, index, setting, told = inputs
        k_layer = None if keys is None else jax.vmap(lambda k: jr.fold_in(k, index))(keys)
        window, angles = setting_of(setting)
        if shared is None:
            q, k, v = project(block, config, x, angles, k_layer)
        else:
            q, (k, v) = queries(block, config, x, angles, k_layer), shared
        scale, softcap = config.query_scale, config.attention_softcap
        mixed = model.attend(q, k, v, rows, window, scale=scale, softcap=softcap)
        x, router = finish(block, config, x, mixed, k_layer, told)
        return x, ((k, v) if shared is None else None, router)

    indices = jnp.arange(layers.start, layers.stop, dtype=jnp.int32)
    return jax.lax.scan(layer, x, (blocks, indices, settings, given))


def in_decoders(models: T, **fields: Any) -> T:
    """The same models (one, or a pytree of several), with these fields in every decoder. Error: no
    decoder is among them.
    """
    found = []

    def change(x: Any) -> Any:
        if not isinstance(x, Decoder):
            return x
        found.append(x)
        return dataclasses.replace(x, **fields)

    changed = jax.tree.map(change, models, is_leaf=lambda x: isinstance(x, Decoder))
    if not found:
        raise ValueError(f"expected a Decoder or models that hold one, got {type(models).__name__}")
    return changed


def with_remat(models: T, remat: Remat) -> T:
    """The models with another policy (remat.py) for the layers of every decoder in them. Error: as
    `in_decoders`.
    """
    return in_decoders(models, remat=remat)


def init_decoder(key: KeyArray, config: Config, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A decoder with random weights: normal, of standard deviation 1/√in (embeddings .02), norms
    1, biases 0.
    """
    c, d, runs = config, config.hidden_size, config.runs
    embed = lambda name, *shape: 0.02 * jr.normal(named_key(key, name), shape, dtype)  # noqa: E731
    head = _random(key, dtype, "head", d, c.vocab_size) if not c.tie_embeddings else None
    if len(runs) == 1:
        layers = _init_stack(key, config, runs[0], "layers", dtype)
    else:
        layers = {
            run.start: _init_stack(key, config, run, f"layers.{run.start}", dtype) for run in runs
        }
    inputs, width = None, c.num_layers * c.layer_input_size
    if width:
        inputs = LayerInputs(
            embed=embed("layer_inputs.embed", c.layer_input_vocab, width),
            project=_random(key, dtype, "layer_inputs.project", d, width),
            norm=jnp.ones(c.layer_input_size, dtype),
        )
    ones = jnp.full(d, 1 - c.norm_offset, dtype)
    return Decoder(embed("embed", c.vocab_size, d), layers, ones, head, config, inputs)


def _random(key: KeyArray, dtype: DTypeLike, name: str, *shape: int) -> Array:
    """Matrices of standard deviation 1/√in, of a key that belongs to their name."""
    return 1 / math.sqrt(shape[-2]) * jr.normal(named_key(key, name), shape, dtype)


def _init_stack(key: KeyArray, config: Config, layers: range, name: str, dtype: DTypeLike) -> Block:
    """One stack of layers of one kind."""
    c, n, d, kind = config, len(layers), config.hidden_size, config.kinds[layers.start]
    heads, kv, own = c.num_heads * kind.head_dim, kind.kv_heads * kind.head_dim, kind.source is None
    weight = lambda leaf, *shape: _random(key, dtype, f"{name}.{leaf}", *shape)  # noqa: E731
    ones = lambda *shape: jnp.full(shape, 1 - c.norm_offset, dtype)  # noqa: E731
    bias = lambda size: jnp.zeros((n, size), dtype) if c.qkv_bias else None  # noqa: E731

    def matrices(name: str, *lead: int, f: int = kind.intermediate_size) -> dict[str, Array]:
        sides = {"gate": (d, f), "up": (d, f), "down": (f, d)}
        return {side: weight(f"{name}.{side}", *lead, *shape) for side, shape in sides.items()}

    router = lambda name: weight(f"{name}.router", n, d, c.num_experts)  # noqa: E731
    if kind.experts:
        mlp = MoE(router=router("mlp"), **matrices("mlp", n, c.num_experts))
    else:
        mlp = MLP(**matrices("mlp", n))
    given = experts = None
    if c.side_expert_size:
        beside = matrices("experts.mlp", n, c.num_experts, f=c.side_expert_size)
        experts = SideExperts(
            norm=ones(n, d),
            router_norm=ones(n, d),
            mlp=MoE(router("experts.mlp"), **beside, scale=jnp.ones((n, c.num_experts), dtype)),
            post_norm=ones(n, d),
            mlp_post_norm=ones(n, d),
        )
    if c.layer_input_size:
        given = LayerInput(
            gate=weight("input.gate", n, d, c.layer_input_size),
            out=weight("input.out", n, c.layer_input_size, d),
            norm=ones(n, d),
        )
    return Block(
        attention_norm=ones(n, d),
        attention=Attention(
            q=weight("attention.q", n, d, heads),
            k=weight("attention.k", n, d, kv) if own else None,
            v=weight("attention.v", n, d, kv) if own and kind.own_values else None,
            o=weight("attention.o", n, heads, d),
            q_bias=bias(heads),
            k_bias=bias(kv),
            v_bias=bias(kv),
            q_norm=ones(n, kind.head_dim) if c.qk_norm else None,
            k_norm=ones(n, kind.head_dim) if c.qk_norm and own else None,
        ),
        mlp_norm=ones(n, d),
        mlp=mlp,
        attention_post_norm=ones(n, d) if c.post_norms else None,
        mlp_post_norm=ones(n, d) if c.post_norms else None,
        input=given,
        scale=jnp.ones((n, 1), dtype) if c.layer_scale else None,
        experts=experts,
    )
