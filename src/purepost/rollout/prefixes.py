"""Keys and values that were computed once and may be wanted again: a cache, from which goes first
what was least recently used.
"""

from collections import OrderedDict
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from ..models.slots import Slots


class Prefixes:
    """Keys and values of token sequences, in `budget` bytes, of one version of the weights: whoever
    changes them clears it.

    What has been computed for a sequence serves every other that begins alike, as far as it does.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"expected a budget of at least 0 bytes, got {budget}")
        self.budget = budget
        self.held = 0  # bytes
        self._entries: OrderedDict[bytes, tuple[Int[np.ndarray, " t"], Slots]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Slots | None]:
        """(how many of these tokens, from the first on, are there; the slot that has them)."""
        wanted = np.asarray(tokens, np.int32)
        best, found = 0, None
        for name, (held, _) in self._entries.items():
            count = _common(held, wanted)
            if count > best:
                best, found = count, name
        if found is None:
            return 0, None
        self._entries.move_to_end(found)
        return best, self._entries[found][1]

    def add(self, tokens: Sequence[int], part: Slots) -> None:
        """Keep a sequence's keys and values. What is longer serves for what it begins with."""
        new = np.asarray(tokens, np.int32)
        for name, (held, _) in list(self._entries.items()):
            count = _common(held, new)
            if count == len(new):
                self._entries.move_to_end(name)
                return
            if count == len(held):
                self._drop(name)
        self._entries[new.tobytes()] = (new, part)
        self.held += _bytes(part)
        while self.held > self.budget:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Forget everything: other weights give other keys and values."""
        self._entries.clear()
        self.held = 0

    def _drop(self, name: bytes) -> None:
        self.held -= _bytes(self._entries.pop(name)[1])


def _common(a: Int[np.ndarray, " t"], b: Int[np.ndarray, " u"]) -> int:
    """How many tokens two sequences have in common from the first on."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


def _bytes(part: Slots) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(part))
