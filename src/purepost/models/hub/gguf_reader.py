"""The header of a GGUF file: its keys with their values, and where its tensors lie.

Nothing that a header says is believed before the file's length has borne it out, so that one that
is damaged is an error soon: it never takes more time or memory than its bytes.
"""

import math
import struct
from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float, UInt8

# Kinds of values, by number: the format's scalars as `struct` writes them, strings, arrays.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DEPTH, _MOST_AXES = 4, 4
_AT_ONCE = 2**18  # values dequantised together


class Stored(NamedTuple):
    """A tensor as the file holds it: rows of blocks."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # of the values
    data: UInt8[np.ndarray, "... bytes"]

    def values(self) -> Float[np.ndarray, "..."]:
        """The float32 values it stands for. Raises: ValueError for a kind that is not known."""
        block, size = GGML_QUANT_SIZES[self.kind]
        blocks = self.data.reshape(-1, size)
        out = np.empty((len(blocks), block), np.float32)
        step = _AT_ONCE // block
        try:
            for start in range(0, len(blocks), step):  # each as one row, whatever the tensor's are
                part = blocks[start : start + step].reshape(1, -1)
                out[start : start + step] = dequantize(part, self.kind).reshape(-1, block)
        except RuntimeError as error:
            raise ValueError(
                f"expected a tensor in a type that can be read, got {self.kind.name}; "
                "use a file of another quantisation"
            ) from error
        return out.reshape(self.shape)


class Header(NamedTuple):
    """The keys of a file, and its tensors by their names."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises: ValueError for anything but a whole one."""
    try:
        with path.open("rb") as file:
            return _read(_Cursor(memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))))
    except ValueError as error:
        raise ValueError(f"expected a GGUF file at {path}, got {error}; fetch it again") from error


class _Cursor:
    """A place in the bytes, moved by reading."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> memoryview:
        """The next bytes."""
        if count > len(self.data) - self.at:
            raise ValueError(f"one that ends early, after {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        """The next number, of a `struct` format."""
        return struct.unpack("<" + kind, self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        """The next string."""
        return str(self.take(self.number("Q")), "utf-8")

    def texts(self, count: int) -> list[str]:
        """The next strings, in one loop: a vocabulary has hundreds of thousands."""
        out: list[str] = []
        data, at, end = self.data, self.at, len(self.data)
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if max(start, at) > end:
                raise ValueError(f"one that ends early, after {end} bytes")
            out.append(str(data[start:at], "utf-8"))
        self.at = at
        return out

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value of this kind; an array is a list."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth == _DEPTH:
            raise ValueError(f"a value of kind {kind} at byte {self.at}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if 8 * count > len(self.data) - self.at:
            raise ValueError(f"an array of {count} items at byte {self.at}, which ends early")
        if inner == _STRING:
            return self.texts(count)
        return [self.value(inner, depth + 1) for _ in range(count)]


def _read(cursor: _Cursor) -> Header:
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("another kind of file")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, not 2 or 3 (in little-endian order)")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.text()
        _check_new(name, fields)
        fields[name] = cursor.value(cursor.number("I"))
    found: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        _check_new(name, found)
        axes = cursor.number("I")
        if not 1 <= axes <= _MOST_AXES:
            raise ValueError(f"{name} of {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]  # the fastest axis came first
        found[name] = (GGMLQuantizationType(cursor.number("I")), shape, cursor.number("Q"))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {alignment!r}, no power of two")
    start = cursor.at + -cursor.at % alignment
    return Header(fields, {name: _stored(name, cursor, start, *x) for name, x in found.items()})


def _stored(
    name: str,
    cursor: _Cursor,
    start: int,
    kind: GGMLQuantizationType,
    shape: tuple[int, ...],
    offset: int,
) -> Stored:
    """A tensor's bytes, where the header says they are."""
    block, size = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"{name} of shape {shape}, not in blocks of {block}")
    row = shape[-1] // block * size
    cursor.at = start + offset
    data = np.frombuffer(cursor.take(math.prod(shape[:-1]) * row), np.uint8)
    return Stored(kind, shape, data.reshape(*shape[:-1], row))


def _check_new(name: str, known: Mapping[str, Any]) -> None:
    if name in known:
        raise ValueError(f"{name!r:.80} twice")
