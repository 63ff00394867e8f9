"""A weight laid out for products with few rows."""

import equinox as eqx
from einops import rearrange
from jaxtyping import Array, Float

LARGEST = 192  # output features per block: beyond, the products are no longer done side by side
SMALLEST = 32


class Tiled(eqx.Module):
    """A raw weight with its output features in blocks, each [out, in].

    XLA's CPU backend multiplies few rows by such a weight faster than by one [in, out] array. It is
    for decoding, never for training or for files.
    """

    blocks: Float[Array, "c o i"]


def tile(w: Float[Array, "i o"]) -> Tiled | Float[Array, "i o"]:
    """The weight in the largest blocks that divide it evenly; as it is where none do."""
    out = w.shape[1]
    size = next((n for n in range(min(LARGEST, out), SMALLEST - 1, -1) if out % n == 0), None)
    if size is None:
        return w
    return Tiled(rearrange(w, "i (c o) -> c o i", o=size))
