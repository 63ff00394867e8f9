"""A tokenizer with what a language model needs to know about its special tokens."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Int
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from .gguf_vocab import backend_from_gguf

Ids = Int[np.ndarray, " t"] | Int[Array, " t"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Tokenizer:
    """Ids from text and back, by the `tokenizers` library, with the special ids beside it.

    `eos_ids` are all ids that end a generation, the tokenizer's own first; `pad_id` only fills rows
    (masks come from lengths), so it may equal one of them.
    """

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    chat_template: str | None

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for no text, such as the end of a turn."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects BOS before any text."""
        return self.bos_id is not None and self.encode("", add_special=True)[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """The ids of a text; special tokens written in it are recognised."""
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and for each the characters [start, end) it stands for."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int] | Ids, *, skip_special: bool = True) -> str:
        """The text of some ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token(self, token_id: int | None) -> str:
        """The written form of one token, "" for None."""
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for in a text; added tokens stand for what is written.

        Raises: ValueError for a vocabulary that is neither byte-level nor SentencePiece.
        """
        undo = _byte_reader(json.loads(self.backend.to_str()).get("decoder"))
        added = self.backend.get_added_tokens_decoder()
        out = [b""] * (max(self.backend.get_vocab().values()) + 1)
        for token, i in self.backend.get_vocab().items():
            out[i] = added[i].content.encode() if i in added else undo(token)
        return out

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": self.token(self.bos_id) or None,
            "eos_token": self.token(self.eos_ids[0]),
            "pad_token": self.token(self.pad_id),
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write_json(directory / "tokenizer_config.json", config)
        eos = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids)
        generation = {"bos_token_id": self.bos_id, "eos_token_id": eos, "pad_token_id": self.pad_id}
        _write_json(directory / "generation_config.json", generation)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read a directory in Hugging Face layout.

        Raises: FileNotFoundError without tokenizer.json; ValueError when no token ends a text.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"expected {path}, found none; save the tokenizer in its fast format first"
            )
        backend = Backend.from_file(str(path))
        config = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        _add_listed_tokens(backend, config.get("added_tokens_decoder", {}))
        bos, eos, pad = (_id(backend, config.get(f"{k}_token")) for k in ("bos", "eos", "pad"))
        more = _read_json(directory / "config.json").get("eos_token_id")
        more = _read_json(directory / "generation_config.json").get("eos_token_id", more)
        eos_ids = _eos_ids(eos, more, str(directory))
        jinja = directory / "chat_template.jinja"
        template = (
            jinja.read_text(encoding="utf-8")
            if jinja.is_file()
            else _template(config.get("chat_template"))
        )
        return cls(backend, bos, eos_ids, eos_ids[0] if pad is None else pad, template)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """Read the tokenizer that a GGUF file carries; `fields` are its keys with their values.

        Raises: ValueError for a kind of vocabulary that is not known, or when no token ends a text.
        """
        backend = backend_from_gguf(fields)
        bos, eos, pad, *turn_ends = (
            None if value is None else int(value)
            for name in ("bos", "eos", "padding", "eot", "eom")
            for value in [fields.get(f"tokenizer.ggml.{name}_token_id")]
        )
        eos_ids = _eos_ids(eos, [i for i in turn_ends if i is not None], "the GGUF file")
        template = fields.get("tokenizer.chat_template")
        return cls(backend, bos, eos_ids, eos_ids[0] if pad is None else pad, template)


def _eos_ids(eos: int | None, more: int | list[int] | None, where: str) -> tuple[int, ...]:
    """All end-of-text ids, the tokenizer's own first, each once."""
    listed = [] if more is None else [more] if isinstance(more, int) else more
    ids = tuple(dict.fromkeys(int(i) for i in ([] if eos is None else [eos]) + listed))
    if not ids:
        raise ValueError(
            f"expected an EOS token, got none in {where}; name eos_token in tokenizer_config.json"
        )
    return ids


def _id(backend: Backend, token: str | Mapping[str, Any] | None) -> int | None:
    """The id of a token named in a configuration, as text or as {"content": text}."""
    if token is None:
        return None
    text = token if isinstance(token, str) else str(token["content"])
    return backend.token_to_id(text)


def _add_listed_tokens(backend: Backend, listed: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json lacks."""
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            flags = {k: bool(entry.get(k)) for k in ("special", "normalized", "lstrip", "rstrip")}
            backend.add_tokens([AddedToken(entry["content"], **flags)])
        got = backend.token_to_id(entry["content"])
        if got != int(key):
            raise ValueError(
                f"expected token {entry['content']!r} to have id {key}, got {got}; "
                "tokenizer.json and tokenizer_config.json belong to different tokenizers"
            )


def _template(value: str | list[dict[str, str]] | None) -> str | None:
    """The chat template; of several named ones, that called "default"."""
    if value is None or isinstance(value, str):
        return value
    return {entry["name"]: entry["template"] for entry in value}.get("default")


def _byte_reader(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """How to turn a token's written form into bytes, by the kind of its decoder."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        table = {character: byte for byte, character in enumerate(_byte_characters())}
        return lambda token: bytes(table[character] for character in token)
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        return _sentencepiece_bytes
    raise ValueError(
        f"expected a byte-level or SentencePiece tokenizer, got decoder {sorted(kinds)}; "
        "use a model with one of those"
    )


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself if printable, else the next from U+0100.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, §2.2.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b if b in printable else 256 + others.index(b)) for b in range(256)]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
