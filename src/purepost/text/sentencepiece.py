"""SentencePiece's own files (`tokenizer.model`), read without its library.

A file is one protocol-buffers message: pieces (1), how they were trained (2), how text is
normalized before it is cut (3). Of each only what decides ids is read.

Source: Kudo and Richardson, SentencePiece, 1808.06226, §3.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import UInt32
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from .pieces import (
    NORMAL,
    USER_DEFINED,
    Pieces,
    add_special,
    bpe_model,
    isolated,
    space_decoder,
    space_normalizers,
    unigram_model,
)

UNIGRAM, BPE = 1, 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the wire types
Value = int | bytes


@dataclass(frozen=True)
class SentencePiece:
    """What a file says; ids are None where it has no such token."""

    pieces: Pieces
    kind: int = UNIGRAM
    byte_fallback: bool = False
    suffix: bool = False  # "▁" ends a word rather than beginning it
    bos_id: int | None = 1
    eos_id: int | None = 2
    pad_id: int | None = None
    replacements: bytes = field(default=b"", repr=False)  # which characters become which
    prefix: bool = True
    strips: bool = True  # spaces at the ends go, of several one stays
    escapes: bool = True


def read_sentencepiece(path: Path) -> SentencePiece:
    """Read a `tokenizer.model` file.

    Raises: FileNotFoundError without it; ValueError when it is malformed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected {path}, found none; copy the tokenizer's files there")
    try:
        return parse_sentencepiece(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"expected a SentencePiece model in {path}: {error}") from error


def parse_sentencepiece(data: bytes) -> SentencePiece:
    """Read the bytes of a `tokenizer.model` file. Raises: ValueError when they are malformed."""
    texts, scores, types = [], [], []
    model = SentencePiece(Pieces([], [], []))
    for number, value in _fields(data):
        match number:
            case 1:
                text, score, kind = _piece(_bytes(value))
                texts.append(text)
                scores.append(score)
                types.append(kind)
            case 2:
                model = _with_training(model, _bytes(value))
            case 3:
                model = _with_normalizer(model, _bytes(value))
    if not texts:
        raise ValueError("expected pieces, got none; the file is no SentencePiece model")
    model = replace(model, pieces=Pieces(texts, scores, types))
    for i in (model.bos_id, model.eos_id, model.pad_id):
        if i is not None and i >= len(texts):
            raise ValueError(f"expected special ids below {len(texts)}, got {i}; mend the file")
    return model


def sentencepiece_backend(model: SentencePiece, *, legacy: bool = True) -> Backend:
    """A tokenizer that gives SentencePiece's ids, and knows its control tokens.

    With `legacy`, SentencePiece's way, each stretch of text between control tokens gets the "▁"
    that begins a text; otherwise only the first one does, unless it begins with a space.
    Raises: ValueError for a kind of model or normalization that is not known.
    """
    if model.suffix or not model.escapes or model.kind not in (UNIGRAM, BPE):
        raise ValueError(
            "expected a unigram or BPE model whose spaces are written '▁' before a word, got "
            f"kind {model.kind}, escaped {model.escapes}, after words {model.suffix}; save the "
            "tokenizer as tokenizer.json"
        )
    texts = model.pieces.of(USER_DEFINED)
    cuts = [isolated(texts)] if texts and model.prefix else []
    if model.kind == BPE:
        core = bpe_model(model.pieces, byte_fallback=model.byte_fallback, whole_words=bool(cuts))
    else:
        core = unigram_model(model.pieces, byte_fallback=model.byte_fallback)
    backend = Backend(core)
    steps: list[normalizers.Normalizer] = []
    if model.replacements:
        _check_replacements(model.replacements)
        steps.append(normalizers.Precompiled(model.replacements))
    if model.strips:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(r" {2,}"), " "))
    backend.normalizer = normalizers.Sequence(
        steps + space_normalizers(prefix=model.prefix and legacy)
    )
    if model.prefix and not legacy:
        cuts = [pre_tokenizers.Metaspace(prepend_scheme="first", split=False), *cuts]
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    every = 1 << 16
    backend.decoder = space_decoder(leading=every if model.strips else int(model.prefix))
    add_special(backend, model.pieces)
    if texts and not model.prefix:  # found in what the normalizer made of the text
        backend.add_tokens([AddedToken(t, special=False, normalized=True) for t in texts])
    return backend


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        match number:
            case 1:
                text = _bytes(value).decode()
            case 2:
                score = _float(value)
            case 3:
                kind = _int(value)
    return text, score, kind


def _with_training(model: SentencePiece, data: bytes) -> SentencePiece:
    for number, value in _fields(data):
        match number:
            case 3:
                model = replace(model, kind=_int(value))
            case 24:
                model = replace(model, suffix=bool(_int(value)))
            case 35:
                model = replace(model, byte_fallback=bool(_int(value)))
            case 41:
                model = replace(model, bos_id=_id(value))
            case 42:
                model = replace(model, eos_id=_id(value))
            case 43:
                model = replace(model, pad_id=_id(value))
    return model


def _with_normalizer(model: SentencePiece, data: bytes) -> SentencePiece:
    for number, value in _fields(data):
        match number:
            case 2:
                model = replace(model, replacements=_bytes(value))
            case 3:
                model = replace(model, prefix=bool(_int(value)))
            case 4:
                model = replace(model, strips=bool(_int(value)))
            case 5:
                model = replace(model, escapes=bool(_int(value)))
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message: its number, and a number (varint) or its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"expected a wire type of 0, 1, 2 or 5, got {wire}; get it again")
        if size > len(data) - at:
            raise ValueError(f"expected {size} more bytes, got {len(data) - at}; it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and where the next thing begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("expected the rest of a number, got the end; the file is cut off")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("expected a number of at most 10 bytes, got a longer one; get the file again")


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("expected a number in a field, got bytes; get the file again")
    return value - (1 << 64) if value >= 1 << 63 else value


def _id(value: Value) -> int | None:
    number = _int(value)
    return None if number < 0 else number


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("expected bytes in a field, got a number; get the file again")
    return value


def _float(value: Value) -> float:
    data = _bytes(value)
    score = struct.unpack("<f", data)[0] if len(data) == 4 else float("nan")
    if not np.isfinite(score):
        raise ValueError(f"expected a finite score in 4 bytes, got {data.hex()}; get it again")
    return score


def _check_replacements(data: bytes) -> None:
    """Whether the trie of replacements stays within itself and points into the texts after it.

    The library follows it unchecked. A unit of 4 bytes is a node: its children are the units of
    one block of 256, at its index ^ offset; where bit 8 is set, a text begins at the number there.
    """
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    texts.decode()  # UnicodeDecodeError is a ValueError
    sound = size % 1024 == 0 and size > 0 and texts.endswith(b"\0")
    if not (sound and _stays_within(np.frombuffer(data[4 : 4 + size], "<u4"), texts)):
        raise ValueError("expected a sound table of replacements, got a broken one; get it again")


def _stays_within(trie: UInt32[np.ndarray, " n"], texts: bytes) -> bool:
    """Whether every step from a node of a trie leads into it, and every text begins in `texts`."""
    units = trie.astype(np.int64)
    nodes = np.flatnonzero(units < 1 << 31)
    found = nodes ^ ((units[nodes] >> 10) << ((units[nodes] & (1 << 9)) >> 6))
    if (found >= len(units)).any():
        return False
    starts = units[found[(units[nodes] & 256) != 0]] & ((1 << 31) - 1)
    first = np.frombuffer(texts, np.uint8)[np.minimum(starts, len(texts) - 1)]
    return not ((starts >= len(texts)).any() or ((first & 0xC0) == 0x80).any())
