"""Guessing tokens from what a row already says, so that one step of the model may yield several.

Position by position the model's own token is drawn, with the key that the position has without
guessing; a guess only says which token to go on from before the draw is known. It was right if the
draw is that token, and all behind the first wrong one is thrown away. So tokens, log-probabilities
and random numbers are those of plain sampling. For a guess d this is speculative sampling: it is
accepted with its probability p(d), and the draw that rejects it is of p(· | not d), the residual.

Source: Leviathan et al., Fast inference from transformers via speculative decoding, 2211.17192,
algorithm 1, for q that is sure of d; guesses from the row's own n-grams, in the place of a small
model's.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def guess(
    tokens: Int[Array, "s t"], last: Int[Array, " s"], *, ngram: int, count: int
) -> Int[Array, "s c"]:
    """The `count` tokens that would follow token number `last` if rows went on as they did where
    they last said the same: the most of the last `ngram` tokens, of such places the latest.

    What follows that place may run into the end: from there it repeats.
    """
    s, t = tokens.shape
    row, index = jnp.arange(s)[:, None], jnp.arange(t, dtype=jnp.int32)
    agree = jnp.broadcast_to(index < last[:, None], (s, t))
    score = jnp.zeros((s, t), jnp.int32)
    for back in range(ngram):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], 1)
        agree &= (jnp.roll(tokens, back, 1) == wanted) & (index >= back)
        score += agree.astype(jnp.int32)
    place = jnp.argmax(jnp.where(index < last[:, None], score * t + index, -1), 1)
    place = place.astype(jnp.int32)[:, None]
    period = jnp.maximum(last[:, None] - place, 1)
    return tokens[row, place + 1 + jnp.arange(count, dtype=jnp.int32) % period]


def right_so_far(guesses: Int[Array, "s c"], drawn: Int[Array, "s c1"]) -> Bool[Array, "s c1"]:
    """Which draws count: the first, and each whose guesses before it were all drawn."""
    right = jnp.cumprod(guesses == drawn[:, : guesses.shape[1]], axis=1, dtype=jnp.int32)
    return jnp.pad(right.astype(bool), [(0, 0), (1, 0)], constant_values=True)
