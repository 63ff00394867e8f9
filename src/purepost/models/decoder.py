"""The decoder: embeddings, a scan over stacked layers, a norm, and a head."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from ..tree import named_key
from ..types import KeyArray, Rows, divide_rows
from ..weights import Weight, linear
from .config import Config as Config
from .layers import MLP, Attention, attention, rms_norm, soft_cap, subkey
from .moe import MoE
from .rope import Angles, rotate

UNLIMITED = 2**31 - 1  # the window of a layer without one, where others have some


class Block(eqx.Module):
    """One layer, or a stack of them on a leading axis."""

    attention_norm: Float[Array, "*l d"]
    attention: Attention
    mlp_norm: Float[Array, "*l d"]
    mlp: MLP | MoE
    attention_post_norm: Float[Array, "*l d"] | None = None
    mlp_post_norm: Float[Array, "*l d"] | None = None


class KV(eqx.Module):
    """Keys (rotated) and values of every layer, in the order of the row; and, of experts, the
    router's probabilities.
    """

    k: Float[Array, "l b t n k"]
    v: Float[Array, "l b t n k"]
    router: Float[Array, "l b t e"] | None = None


class Setting(NamedTuple):
    """What differs between layers beside their weights."""

    window: int | Int[Array, ""] | None
    angles: Angles


def norm(
    config: Config, x: Float[Array, "*s d"], scale: Float[Array, " d"]
) -> Float[Array, "*s d"]:
    """The family's norm."""
    return rms_norm(x, scale, config.norm_eps, config.norm_offset)


def project(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    angles: Angles,
    key: Key[Array, " b"] | None = None,
) -> tuple[Float[Array, "*s h k"], Float[Array, "*s n k"], Float[Array, "*s n k"]]:
    """Rotated queries, rotated keys, and values of a layer."""
    normed = norm(config, x, block.attention_norm)
    w = block.attention

    def heads(i: int, weight: Weight, bias: Float[Array, " o"] | None) -> Float[Array, "*s m k"]:
        y = linear(normed, weight, key=subkey(key, i))
        y = y if bias is None else y + bias.astype(y.dtype)
        return rearrange(y, "... (h k) -> ... h k", k=config.head_dim)

    q, k, v = heads(0, w.q, w.q_bias), heads(1, w.k, w.k_bias), heads(2, w.v, w.v_bias)
    q = q if w.q_norm is None else norm(config, q, w.q_norm)
    k = k if w.k_norm is None else norm(config, k, w.k_norm)
    return rotate(q, *angles), rotate(k, *angles), v


def finish(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    mixed: Float[Array, "*s h k"],
    key: Key[Array, " b"] | None = None,
) -> tuple[Float[Array, "*s d"], Float[Array, "*s e"] | None]:
    """The rest of a layer: output projection and MLP, each added to the stream; and the router's
    probabilities.
    """

    def normed_by(
        scale: Float[Array, " d"] | None, y: Float[Array, "*s d"]
    ) -> Float[Array, "*s d"]:
        return y if scale is None else norm(config, y, scale)

    mixed = rearrange(mixed, "... h k -> ... (h k)")
    mixed = linear(mixed, block.attention.o, key=subkey(key, 3))
    x = x + normed_by(block.attention_post_norm, mixed)
    normed = norm(config, x, block.mlp_norm)
    match block.mlp:
        case MoE() as experts:
            out, router = experts(
                normed,
                config.activation,
                config.experts_per_token,
                normalize=config.normalize_experts,
                key=key,
            )
        case mlp:
            out, router = mlp(normed, config.activation, key=key), None
    return x + normed_by(block.mlp_post_norm, out), router


class Unembed(eqx.Module):
    """The map from hidden states to logits."""

    weight: Weight  # [d, v]; tied: the embeddings, [v, d]
    tied: bool = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True, default=None)

    def __call__(self, hidden: Float[Array, "*s d"]) -> Float[Array, "*s v"]:
        """Logits, float32."""
        if self.tied:  # embed · hiddenᵀ: on CPUs as fast as hidden · embedᵀ, for few tokens faster
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits = jnp.einsum("vd,nd->vn", self.weight, flat, preferred_element_type=jnp.float32)
            logits = logits.T.reshape(*hidden.shape[:-1], -1)
        else:
            logits = linear(hidden, self.weight).astype(jnp.float32)
        return soft_cap(logits, self.softcap)


class Decoder(eqx.Module):
    """A decoder-only transformer over forest rows."""

    embed: Float[Array, "v d"]
    layers: Block  # stacked: every leaf has a leading layer axis
    norm: Float[Array, " d"]
    head: Weight | None  # [d, v]; None: the embeddings, transposed
    config: Config = eqx.field(static=True)

    def __call__(
        self, rows: Rows, *, key: KeyArray | None = None
    ) -> tuple[Float[Array, "b t d"], KV]:
        """Hidden states after the last norm, and every layer's keys and values.

        `key` turns adapter dropout on.
        """
        config = self.config
        saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        x = self.lookup(rows.tokens)
        settings, setting_of = _settings(config, rows.positions)
        keys = None if key is None else jax.vmap(lambda i: jr.fold_in(key, i))(rows.ids)

        # The backward pass keeps what the matrix products gave and computes the rest again: cheaper
        # than writing it to memory and reading it back.
        @partial(jax.checkpoint, policy=saved, prevent_cse=False)
        def layer(x: Float[Array, "b t d"], inputs: tuple[Block, Int[Array, ""], PyTree]):
            block, index, setting = inputs
            k_layer = None if keys is None else jax.vmap(lambda k: jr.fold_in(k, index))(keys)
            window, angles = setting_of(setting)
            q, k, v = project(block, config, x, angles, k_layer)
            scale, softcap = config.query_scale, config.attention_softcap
            mixed = attention(q, k, v, rows, window, scale=scale, softcap=softcap)
            x, router = finish(block, config, x, mixed, k_layer)
            return x, (k, v, router)

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        x, kept = jax.lax.scan(layer, x, (self.layers, indices, settings))
        return norm(config, x, self.norm), KV(*kept)

    def lookup(self, tokens: Int[Array, "b *s"]) -> Float[Array, "b *s d"]:
        """The embeddings of tokens, as the first layer reads them."""
        x, scale = divide_rows(self.embed[tokens]), self.config.embed_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    @property
    def unembed(self) -> "Unembed":
        """Hidden states → logits: a pytree of its own, so that a loss can differentiate just it."""
        weight = self.embed if self.head is None else self.head
        return Unembed(weight, self.head is None, self.config.final_softcap)


def _settings(
    config: Config, positions: Int[Array, "b t"]
) -> tuple[PyTree, Callable[[PyTree], Setting]]:
    """What to scan over beside the layers, and the function from a layer's part of it to its
    setting. Layers that are all alike scan over nothing.
    """
    windows = config.layer_windows
    if len(set(windows)) == 1:
        alike = Setting(windows[0], config.rope(windows[0]).angles(positions))
        return None, lambda _: alike
    sizes = jnp.asarray([UNLIMITED if w is None else w for w in windows], jnp.int32)
    plain = config.rope(None).angles(positions)
    if not config.has_two_ropes:
        return sizes, lambda size: Setting(size, plain)
    windowed = config.rope(1).angles(positions)

    def setting(size: Int[Array, ""]) -> Setting:
        full = size == UNLIMITED
        return Setting(size, jax.tree.map(lambda a, b: jnp.where(full, a, b), plain, windowed))

    return sizes, setting


def init_decoder(key: KeyArray, config: Config, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A decoder with random weights: normal, of standard deviation 1/√in (embeddings .02), norms
    1, biases 0.
    """
    c, n, d, f = config, config.num_layers, config.hidden_size, config.intermediate_size
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def weight(name: str, *shape: int) -> Array:
        scale = 0.02 if name == "embed" else 1 / math.sqrt(shape[-2])
        return scale * jr.normal(named_key(key, name), shape, dtype)

    ones = lambda *shape: jnp.full(shape, 1 - c.norm_offset, dtype)  # noqa: E731
    bias = lambda size: jnp.zeros((n, size), dtype) if c.qkv_bias else None  # noqa: E731
    experts = (n, c.num_experts) if c.num_experts else (n,)
    matrices = {
        "gate": weight("layers.mlp.gate", *experts, d, f),
        "up": weight("layers.mlp.up", *experts, d, f),
        "down": weight("layers.mlp.down", *experts, f, d),
    }
    if c.num_experts:
        mlp = MoE(router=weight("layers.mlp.router", n, d, c.num_experts), **matrices)
    else:
        mlp = MLP(**matrices)
    return Decoder(
        embed=weight("embed", c.vocab_size, d),
        layers=Block(
            attention_norm=ones(n, d),
            attention=Attention(
                q=weight("layers.attention.q", n, d, heads),
                k=weight("layers.attention.k", n, d, kv),
                v=weight("layers.attention.v", n, d, kv),
                o=weight("layers.attention.o", n, heads, d),
                q_bias=bias(heads),
                k_bias=bias(kv),
                v_bias=bias(kv),
                q_norm=ones(n, c.head_dim) if c.qk_norm else None,
                k_norm=ones(n, c.head_dim) if c.qk_norm else None,
            ),
            mlp_norm=ones(n, d),
            mlp=mlp,
            attention_post_norm=ones(n, d) if c.post_norms else None,
            mlp_post_norm=ones(n, d) if c.post_norms else None,
        ),
        norm=ones(d),
        head=None if c.tie_embeddings else weight("head", d, c.vocab_size),
        config=c,
    )
