"""Models that read numbers off a decoder's hidden states: scores of whole sequences (a reward
model, a classifier) and values of every token (a critic).
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PyTree

from ..types import KeyArray, Rows
from ..weights import default_trainable
from .decoder import Decoder


class SequenceClassifier(eqx.Module):
    """Scores of a sequence, read at its last token: those that transformers'
    `*ForSequenceClassification` gives. With one score it is a reward model.
    """

    decoder: Decoder
    head: Float[Array, "d n"]
    bias: Float[Array, " n"] | None = None

    def __call__(self, rows: Rows, *, key: KeyArray | None = None) -> Float[Array, "b e n"]:
        """The scores of every episode of every row, at its last trained token (at the row's first
        where none is trained); float32. `key` turns adapter dropout on.
        """
        hidden, _ = self.decoder(rows, key=key)
        index = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
        episodes = jnp.arange(rows.episodes, dtype=rows.episode.dtype)[:, None]
        mine = rows.mask[:, None] & (rows.episode[:, None] == episodes)  # [b, e, t]
        last = jnp.where(mine, index, 0).max(-1)
        return _project(jnp.take_along_axis(hidden, last[..., None], 1), self.head, self.bias)


class ValueHead(eqx.Module):
    """The value of the state in which each token was chosen. With GAE it is PPO's critic."""

    decoder: Decoder
    head: Float[Array, "d 1"]
    bias: Float[Array, " 1"] | None = None

    def __call__(self, rows: Rows, *, key: KeyArray | None = None) -> Float[Array, "b t"]:
        """The value of a token is that of the state before it, read where its log-probability is:
        at the hidden state of its parent. 0 where nothing is trained; float32. `key` turns adapter
        dropout on.
        """
        values = jnp.take_along_axis(self.after(rows, key=key), rows.parent, 1)
        return jnp.where(rows.mask, values, 0.0)

    def after(self, rows: Rows, *, key: KeyArray | None = None) -> Float[Array, "b t"]:
        """The value of the state that follows each token: what a cut completion may be continued
        from; float32.
        """
        hidden, _ = self.decoder(rows, key=key)
        return _project(hidden, self.head, self.bias)[..., 0]


class TrunkValue(eqx.Module):
    """The value of each token's state, read off hidden states that another model made of the rows:
    a critic that is a head alone.
    """

    head: Float[Array, "d 1"]
    detached: bool = eqx.field(static=True)  # no gradient goes on into that model

    def __call__(self, hidden: Float[Array, "b t d"], rows: Rows) -> Float[Array, "b t"]:
        """As ValueHead's: read at a token's parent, 0 where nothing is trained; float32."""
        hidden = jax.lax.stop_gradient(hidden) if self.detached else hidden
        values = _project(hidden, self.head, None)[..., 0]
        return jnp.where(rows.mask, jnp.take_along_axis(values, rows.parent, 1), 0.0)


def reward_model(key: KeyArray, decoder: Decoder, *, scores: int = 1) -> SequenceClassifier:
    """A classifier on a decoder, whose language-model head it leaves out; its own head is normal,
    of standard deviation 1/√(d+1).
    """
    if scores < 1:
        raise ValueError(f"expected at least 1 score, got {scores}")
    width = decoder.config.hidden_size
    head = jr.normal(key, (width, scores), jnp.float32) * (width + 1) ** -0.5
    return SequenceClassifier(headless(decoder), head)


def value_model(decoder: Decoder) -> ValueHead:
    """A critic on a decoder, whose language-model head it leaves out; every value starts at 0."""
    return ValueHead(headless(decoder), jnp.zeros((decoder.config.hidden_size, 1), jnp.float32))


def headless(decoder: Decoder) -> Decoder:
    """The decoder without a language-model head of its own (its embeddings can still serve)."""
    config = dataclasses.replace(decoder.config, tie_embeddings=True)
    return dataclasses.replace(decoder, head=None, config=config)


def _project(
    hidden: Float[Array, "*s d"], head: Float[Array, "d n"], bias: Float[Array, " n"] | None
) -> Float[Array, "*s n"]:
    """hidden @ head + bias, in float32."""
    out = hidden.astype(jnp.float32) @ head.astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def adapters_and_head(models: SequenceClassifier | ValueHead) -> PyTree:
    """The decoder's adapters, or all of its floats if it has none, and the head."""
    return eqx.tree_at(
        lambda m: [x for x in (m.head, m.bias) if x is not None],
        default_trainable(models),
        replace_fn=lambda _: True,
    )
