"""What every layer of a Gemma 4 is told of the token anew, and how a layer takes it in."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, Key

from ..weights import Weight, linear, lookup
from .layers import Activation, rms_norm, subkey


class LayerInputs(eqx.Module):
    """Of every layer p features, (e[token]·√p + norm(x W / √d)) / √2: what the token is, and what
    the stream x says of it.
    """

    embed: Any  # a weight [w, l·p] of any kind
    project: Weight  # [d, lp]
    norm: Float[Array, " p"]

    def __call__(
        self, tokens: Int[Array, "*s"], x: Float[Array, "*s d"], eps: float
    ) -> Float[Array, "l *s p"]:
        """The inputs of all layers; x is what the first one reads."""
        width = self.norm.shape[0]
        split = lambda y: rearrange(y, "... (l p) -> l ... p", p=width)  # noqa: E731
        known = split(lookup(self.embed, tokens)) * jnp.asarray(width**0.5, x.dtype)
        read = split(linear(x, self.project)) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        return (rms_norm(read, self.norm, eps) + known) * jnp.asarray(2**-0.5, x.dtype)


class LayerInput(eqx.Module):
    """norm(out(activation(gate x) · input)), which a layer adds to its stream x."""

    gate: Weight  # [d, p]
    out: Weight  # [p, d]
    norm: Float[Array, "*l d"]

    def __call__(
        self,
        x: Float[Array, "*s d"],
        given: Float[Array, "*s p"],
        activation: Activation,
        eps: float,
        *,
        key: Key[Array, " b"] | None = None,
    ) -> Float[Array, "*s d"]:
        """What is added; `key` (one per row) turns adapter dropout on."""
        gated = activation(linear(x, self.gate, key=subkey(key, 8))) * given
        return rms_norm(linear(gated, self.out, key=subkey(key, 9)), self.norm, eps)
