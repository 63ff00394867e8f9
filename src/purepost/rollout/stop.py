"""Stop strings as automata over tokens, so that a string that begins in one token and ends in
another is found.
"""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


class StopStrings(eqx.Module):
    """For each string and each number of its bytes matched so far: how many are matched after a
    token.

    The Knuth–Morris–Pratt automaton of the string's bytes, run over each token's bytes
    beforehand. The last state is final.
    """

    table: Int[Array, "w m v"]
    lengths: Int[Array, " w"]

    def start(self, rows: int) -> Int[Array, "n w"]:
        """Nothing matched yet."""
        return jnp.zeros((rows, self.lengths.shape[0]), jnp.int32)

    def advance(
        self, matched: Int[Array, "n w"], tokens: Int[Array, " n"]
    ) -> tuple[Int[Array, "n w"], Bool[Array, " n"]]:
        """(matched bytes after the tokens, whether some string is complete).

        An id beyond the tokenizer's, where embeddings are padded, matches nothing.
        """
        strings = jnp.arange(self.lengths.shape[0])
        following = self.table.at[strings, matched, tokens[:, None]]
        matched = following.get(mode="fill", fill_value=0).astype(jnp.int32)
        return matched, (matched == self.lengths).any(-1)


def _automaton(pattern: bytes) -> np.ndarray:
    """next[state, byte]; the state len(pattern) is final and stays."""
    size = len(pattern)
    following = np.zeros((size + 1, 256), np.int32)
    following[0, pattern[0]] = 1
    fallback = 0
    for state in range(1, size):
        following[state] = following[fallback]
        following[state, pattern[state]] = state + 1
        fallback = following[fallback, pattern[state]]
    following[size] = size
    return following


def stop_strings(strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopStrings:
    """The automata of the strings over a vocabulary; token i stands for `token_bytes[i]`."""
    if not strings or not all(strings):
        raise ValueError(f"expected stop strings that are not empty, got {list(strings)}")
    patterns = [s.encode() for s in strings]
    most = max(map(len, patterns))
    table = np.zeros((len(patterns), most + 1, len(token_bytes)), np.int16)
    sizes = np.array([len(b) for b in token_bytes])
    padded = np.zeros((len(token_bytes), max(1, sizes.max())), np.uint8)
    for i, b in enumerate(token_bytes):
        padded[i, : len(b)] = np.frombuffer(b, np.uint8)
    for w, pattern in enumerate(patterns):
        following = _automaton(pattern)
        state = np.repeat(np.arange(len(pattern) + 1)[:, None], len(token_bytes), 1)
        for place in range(padded.shape[1]):
            state = np.where(place < sizes, following[state, padded[:, place]], state)
        table[w, : len(pattern) + 1] = state
    return StopStrings(jnp.asarray(table), jnp.asarray([len(p) for p in patterns], jnp.int32))
