"""The reader of the `gguf` package, made several times faster."""

from typing import Any

import numpy as np
from gguf import GGUFReader


class Reader(GGUFReader):
    """Keeps the mapped file as a plain array: it takes a slice for each of the vocabulary's words,
    and slices of NumPy's own memmap class are slow.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, a memmap as the array it is."""
        plain = np.asarray(value) if isinstance(value, np.memmap) else value
        object.__setattr__(self, name, plain)
