"""One layer: attention's projections, and what comes after attention."""

import equinox as eqx
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Key

from ..weights import Weight, linear
from .config import Config
from .layer_inputs import LayerInput
from .layers import MLP, Attention, rms_norm, subkey
from .moe import MoE, SideExperts
from .rope import Angles, rotate


class Block(eqx.Module):
    """One layer, or a stack of them on a leading axis."""

    attention_norm: Float[Array, "*l d"]
    attention: Attention
    mlp_norm: Float[Array, "*l d"]
    mlp: MLP | MoE
    attention_post_norm: Float[Array, "*l d"] | None = None
    mlp_post_norm: Float[Array, "*l d"] | None = None
    input: LayerInput | None = None
    scale: Float[Array, "*l 1"] | None = None
    experts: SideExperts | None = None


def norm(
    config: Config, x: Float[Array, "*s d"], scale: Float[Array, " d"]
) -> Float[Array, "*s d"]:
    """The family's norm."""
    return rms_norm(x, scale, config.norm_eps, config.norm_offset)


def _heads(
    normed: Float[Array, "*s d"],
    weight: Weight,
    bias: Float[Array, " o"] | None,
    angles: Angles,
    key: Key[Array, " b"] | None,
) -> Float[Array, "*s m k"]:
    """A projection, head by head, before norms and rotation."""
    y = linear(normed, weight, key=key)
    y = y if bias is None else y + bias.astype(y.dtype)
    return rearrange(y, "... (h k) -> ... h k", k=2 * angles[0].shape[-1])


def queries(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    angles: Angles,
    key: Key[Array, " b"] | None = None,
) -> Float[Array, "*s h k"]:
    """Rotated queries of a layer."""
    w, normed = block.attention, norm(config, x, block.attention_norm)
    q = _heads(normed, w.q, w.q_bias, angles, subkey(key, 0))
    q = q if w.q_norm is None else norm(config, q, w.q_norm)
    return rotate(q, *angles)


def project(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    angles: Angles,
    key: Key[Array, " b"] | None = None,
) -> tuple[Float[Array, "*s h k"], Float[Array, "*s n k"], Float[Array, "*s n k"]]:
    """Rotated queries, rotated keys, and values of a layer that has its own."""
    w, normed = block.attention, norm(config, x, block.attention_norm)
    if w.k is None:
        raise ValueError("expected a layer with keys of its own, got one that reads another's")
    k = _heads(normed, w.k, w.k_bias, angles, subkey(key, 1))
    v = k if w.v is None else _heads(normed, w.v, w.v_bias, angles, subkey(key, 2))
    k = k if w.k_norm is None else norm(config, k, w.k_norm)
    if config.value_norm:
        v = rms_norm(v, jnp.ones(v.shape[-1]), config.norm_eps)
    return queries(block, config, x, angles, key), rotate(k, *angles), v


def finish(
    block: Block,
    config: Config,
    x: Float[Array, "*s d"],
    mixed: Float[Array, "*s h k"],
    key: Key[Array, " b"] | None = None,
    given: Float[Array, "*s p"] | None = None,
) -> tuple[Float[Array, "*s d"], Float[Array, "*s e"] | None]:
    """The rest of a layer: output projection and MLP, each added to the stream, and what is `given`
    of the token; and the router's probabilities.
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
    if block.experts is not None:
        chosen, eps = config.experts_per_token, config.norm_eps
        out, router = block.experts(x, out, config.activation, chosen, eps, key=key)
    x = x + normed_by(block.mlp_post_norm, out)
    if block.input is not None and given is not None:
        x = x + block.input(x, given, config.activation, config.norm_eps, key=key)
    return x if block.scale is None else x * block.scale.astype(x.dtype), router
