"""Noise on the embeddings in training, as a transform of a model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ..tree import named_key
from ..types import KeyArray, Rows
from ..weights import lookup
from .decoder import KV, Decoder, Unembed


class Neftune(eqx.Module):
    """A decoder whose embeddings get uniform noise of ±α/√(T d) where it is called with a key, T
    the tokens of the row. A row's noise is its own.

    Source: Jain et al., NEFTune, 2310.05914, algorithm 1. Differs from the paper: sequences that
    are packed into a row have the row's T.
    """

    decoder: Decoder
    alpha: float | int = eqx.field(static=True, default=5.0)

    def __check_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"expected alpha > 0, got {self.alpha}")

    def __call__(
        self, rows: Rows, *, key: KeyArray | None = None
    ) -> tuple[Float[Array, "b t d"], KV]:
        """As the decoder; `key` turns the noise on, and adapter dropout."""
        if key is None:
            return self.decoder(rows)
        embedded = lookup(self.decoder.embed, rows.tokens)
        b, t, d = embedded.shape
        index = jnp.arange(t, dtype=rows.end.dtype)
        real = (rows.end > index + 1) | ((rows.parent != index) & (rows.end > 0))
        area = jnp.maximum(real.sum(1), 1).astype(jnp.float32) * d
        root = named_key(key, "embed")

        def draw(row: Array) -> Float[Array, "t d"]:
            return jr.uniform(jr.fold_in(root, row), (t, d), minval=-1.0, maxval=1.0)

        noise = jax.vmap(draw)(rows.ids) * (self.alpha / jnp.sqrt(area))[:, None, None]
        # Every token of the rows becomes an entry of its own of the table that is looked up in.
        table = (embedded + noise.astype(embedded.dtype)).reshape(b * t, -1)
        places = jnp.arange(b * t, dtype=rows.tokens.dtype).reshape(b, t)
        noisy = eqx.tree_at(lambda m: m.embed, self.decoder, table)
        if noisy.layer_inputs is not None:
            told = lookup(noisy.layer_inputs.embed, rows.tokens).reshape(b * t, -1)
            noisy = eqx.tree_at(lambda m: m.layer_inputs.embed, noisy, told)
        return noisy(eqx.tree_at(lambda r: r.tokens, rows, places), key=key)

    @property
    def unembed(self) -> Unembed:
        """The decoder's: no noise reaches the head."""
        return self.decoder.unembed
