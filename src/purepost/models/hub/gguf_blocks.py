"""GGUF's weights of 8 and 4 bits, kept in these bits: Q8_0 and Q4_0, which are ours but for the
order of the axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from gguf import GGMLQuantizationType
from jax.typing import DTypeLike
from jaxtyping import Float16, Int8, PyTree, UInt8

from ...tree import named_leaves
from ...weights import from_blocks
from .convert import Names, Place, hf_names
from .gguf_reader import Stored

_DTYPES = {GGMLQuantizationType.Q8_0: np.int8, GGMLQuantizationType.Q4_0: np.uint8}


class Blocks(NamedTuple):
    """Codes and scales of a tensor [out, in], a block of 32 inputs after the other."""

    codes: Int8[np.ndarray, "o i"] | UInt8[np.ndarray, "o i"]
    scales: Float16[np.ndarray, "o n"]


def blocks_of(stored: Stored) -> Blocks | None:
    """The blocks of a matrix in one of these types; None for any other.

    A block is its scale, float16, and its codes: 32 int8; or 16 bytes, of which the low bits are
    the first half's, as ours are.
    """
    if stored.kind not in _DTYPES or len(stored.shape) != 2:
        return None
    count = stored.shape[1] // 32
    data = stored.data.reshape(stored.shape[0], count, -1)
    scales = np.ascontiguousarray(data[..., :2]).view(np.float16)[..., 0]
    codes = np.ascontiguousarray(data[..., 2:]).view(_DTYPES[stored.kind])
    return Blocks(codes.reshape(stored.shape[0], -1), scales)


def stacked(
    name: str, blocks: Sequence[Blocks | None], lead: tuple[int, ...], dtype: DTypeLike,
    place: Place,
) -> PyTree | None:  # fmt: skip
    """Our weight [*lead, in, out] of the matrices of all layers and experts; None unless all of
    them are in one of these types. Error: scales that are not finite.
    """
    found = [b for b in blocks if b is not None]
    if len(found) < len(blocks) or len({b.codes.dtype for b in found}) != 1:
        return None
    codes, scales = (np.stack([x.T for x in part]) for part in zip(*found, strict=True))
    if not np.isfinite(8 * scales).all():
        raise ValueError(f"expected finite scales of {name}, got others; fetch the file again")

    def put(part: str, x: np.ndarray) -> jax.Array:
        return place(f"{name}.{part}", x.reshape(*lead, *x.shape[1:]))

    return from_blocks(put("codes", codes), put("scales", scales), dtype)


def kept_weights(
    tensors: Any,  # gguf.GgufTensors
    names: Names,
    dtype: DTypeLike,
    place: Place,
    skeleton: PyTree,
) -> Mapping[str, PyTree]:
    """The weights of a model that a file has in these types, by their paths."""
    out: dict[str, PyTree] = {}
    for name, leaf in named_leaves(skeleton):
        pattern, transposed = names[name]
        if not transposed:
            continue
        blocks = [tensors.blocks(source) for source in hf_names(name, names, leaf.shape)]
        weight = stacked(name, blocks, leaf.shape[: pattern.count("{}")], dtype, place)
        if weight is not None:
            out[name] = weight
    return out
