"""The decoder: embeddings, a scan over stacked layers, a norm, and a head."""

import math
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from ..tree import named_key
from ..types import KeyArray, Rows, divide_rows
from ..weights import Weight, linear
from .layers import (
    MLP,
    Attention,
    RopeScaling,
    attention,
    rms_norm,
    rope_angles,
    rope_frequencies,
    rotate,
    subkey,
)


@dataclass(frozen=True)
class Config:
    """The shape of a decoder. Sizes in numbers of features, layers, heads; positions in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    max_positions: int = 8192
    family: str = "llama"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_kv_heads to divide num_heads {self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim for rotary positions, got {self.head_dim}")


class Block(eqx.Module):
    """One layer, or a stack of them on a leading axis."""

    attention_norm: Float[Array, "*l d"]
    attention: Attention
    mlp_norm: Float[Array, "*l d"]
    mlp: MLP


class KV(eqx.Module):
    """Keys (rotated) and values of every layer, in the order of the row."""

    k: Float[Array, "l b t n k"]
    v: Float[Array, "l b t n k"]


def project(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    angles: tuple[Float[Array, "*s half"], Float[Array, "*s half"]],
    key: Key[Array, " b"] | None = None,
) -> tuple[Float[Array, "*s h k"], Float[Array, "*s n k"], Float[Array, "*s n k"]]:
    """Rotated queries, rotated keys, and values of a layer."""
    normed = rms_norm(x, block.attention_norm, config.norm_eps)
    q, k, v = (
        rearrange(linear(normed, w, key=subkey(key, i)), "... (h k) -> ... h k", k=config.head_dim)
        for i, w in enumerate((block.attention.q, block.attention.k, block.attention.v))
    )
    return rotate(q, *angles), rotate(k, *angles), v


def finish(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    mixed: Float[Array, "*s h k"],
    key: Key[Array, " b"] | None = None,
) -> Float[Array, "*s d"]:
    """The rest of a layer: output projection and MLP, each added to the stream."""
    mixed = rearrange(mixed, "... h k -> ... (h k)")
    x = x + linear(mixed, block.attention.o, key=subkey(key, 3))
    return x + block.mlp(rms_norm(x, block.mlp_norm, config.norm_eps), key=key)


class Unembed(eqx.Module):
    """The map from hidden states to logits."""

    weight: Weight  # [d, v]; tied: the embeddings, [v, d]
    tied: bool = eqx.field(static=True)

    def __call__(self, hidden: Float[Array, "*s d"]) -> Float[Array, "*s v"]:
        """Logits, float32."""
        if self.tied:  # embed · hiddenᵀ: on CPUs as fast as hidden · embedᵀ, for few tokens faster
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits = jnp.einsum("vd,nd->vn", self.weight, flat, preferred_element_type=jnp.float32)
            return logits.T.reshape(*hidden.shape[:-1], -1)
        return linear(hidden, self.weight).astype(jnp.float32)


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
        x = divide_rows(self.embed[rows.tokens])
        angles = rope_angles(rows.positions, self.frequencies)
        keys = None if key is None else jax.vmap(lambda i: jr.fold_in(key, i))(rows.ids)

        # The backward pass keeps what the matrix products gave and computes the rest again: cheaper
        # than writing it to memory and reading it back.
        @partial(jax.checkpoint, policy=saved, prevent_cse=False)
        def layer(x: Float[Array, "b t d"], inputs: tuple[Block, Int[Array, ""]]):
            block, index = inputs
            k_layer = None if keys is None else jax.vmap(lambda k: jr.fold_in(k, index))(keys)
            q, k, v = project(block, config, x, angles, k_layer)
            mixed = attention(q, k, v, rows)
            return finish(block, config, x, mixed, k_layer), (k, v)

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        x, (k, v) = jax.lax.scan(layer, x, (self.layers, indices))
        return rms_norm(x, self.norm, config.norm_eps), KV(k, v)

    @property
    def frequencies(self) -> Float[np.ndarray, " half"]:
        """Rotary inverse frequencies, radians per token, [k/2]."""
        c = self.config
        return rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)

    @property
    def unembed(self) -> "Unembed":
        """Hidden states → logits: a pytree of its own, so that a loss can differentiate just it."""
        return Unembed(self.embed, True) if self.head is None else Unembed(self.head, False)


def init_decoder(key: KeyArray, config: Config, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A decoder with random weights: normal, of standard deviation 1/√in (embeddings .02), norms
    1.
    """
    c, n, d, f = config, config.num_layers, config.hidden_size, config.intermediate_size
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def weight(name: str, *shape: int) -> Array:
        scale = 0.02 if name == "embed" else 1 / math.sqrt(shape[-2])
        return scale * jr.normal(named_key(key, name), shape, dtype)

    ones = lambda *shape: jnp.ones(shape, dtype)  # noqa: E731
    return Decoder(
        embed=weight("embed", c.vocab_size, d),
        layers=Block(
            attention_norm=ones(n, d),
            attention=Attention(
                q=weight("layers.attention.q", n, d, heads),
                k=weight("layers.attention.k", n, d, kv),
                v=weight("layers.attention.v", n, d, kv),
                o=weight("layers.attention.o", n, heads, d),
            ),
            mlp_norm=ones(n, d),
            mlp=MLP(
                gate=weight("layers.mlp.gate", n, d, f),
                up=weight("layers.mlp.up", n, d, f),
                down=weight("layers.mlp.down", n, f, d),
            ),
        ),
        norm=ones(d),
        head=None if c.tie_embeddings else weight("head", d, c.vocab_size),
        config=c,
    )
