"""A tokenizer with what a language model needs to know about its special tokens."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Int
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from .gguf_vocab import backend_from_gguf, token_id, turn_end_ids
from .pieces import add_ends
from .sentencepiece import SentencePiece, read_sentencepiece, sentencepiece_backend

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

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for no text, such as the end of a turn."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects BOS before any text."""
        added = self.backend.encode("", add_special_tokens=True).ids
        return self.bos_id is not None and added[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """The ids of a text; special tokens written in it are recognised.

        With `add_special` also those that the model expects around a text: BOS once, even where
        the text begins with it.
        """
        ids = self.backend.encode(text, add_special_tokens=add_special).ids
        twice = self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]
        return ids[1:] if add_special and twice and self.adds_bos else ids

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
            written = i in added and undo is not _sentencepiece_bytes
            out[i] = token.encode() if written else undo(token)
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
        """Read a directory in Hugging Face layout: tokenizer.json, else tokenizer.model.

        Raises: FileNotFoundError without either; ValueError for malformed files, and when no token
        ends a text.
        """
        config = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        backend, model = _read_backend(directory, config)
        _add_listed_tokens(backend, config.get("added_tokens_decoder") or {})
        named: dict[str, int | None] = {"bos": None, "eos": None, "pad": None}
        if model is not None:
            named = {"bos": model.bos_id, "eos": model.eos_id, "pad": model.pad_id}
        for name in named:
            if (value := config.get(f"{name}_token")) is not None:
                named[name] = _id(backend, name, value)
        bos, eos, pad = named.values()
        adds_bos = config.get("add_bos_token", None if model is None else True)
        adds_eos = config.get("add_eos_token")
        if adds_bos is not None or adds_eos is not None:
            add_ends(backend, bos=bos if adds_bos else None, eos=eos if adds_eos else None)
        more = _read_json(directory / "config.json").get("eos_token_id")
        more = _read_json(directory / "generation_config.json").get("eos_token_id", more)
        eos_ids = _eos_ids(eos, more, str(directory))
        template = _read_template(directory, config)
        return cls(backend, bos, eos_ids, eos_ids[0] if pad is None else pad, template)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """Read the tokenizer that a GGUF file carries; `fields` are its keys with their values.

        Raises: ValueError for a kind of vocabulary that is not known, or when no token ends a text.
        """
        backend = backend_from_gguf(fields)
        names = ("bos", "eos", "padding", "eot", "eom")
        bos, eos, pad, *turn_ends = (token_id(fields, name) for name in names)
        more = [i for i in turn_ends if i is not None] or turn_end_ids(backend)
        eos_ids = _eos_ids(eos, more, "the GGUF file")
        template = fields.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ValueError("expected tokenizer.chat_template to be a text; mend the file")
        return cls(backend, bos, eos_ids, eos_ids[0] if pad is None else pad, template)


def _read_backend(
    directory: Path, config: Mapping[str, Any]
) -> tuple[Backend, SentencePiece | None]:
    """The tokenizer of a directory, and the SentencePiece model that it is made from, if any."""
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            backend = Backend.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # the library raises nothing narrower, and its panics are none
            raise ValueError(
                f"expected a tokenizer in {path}, got an error: {error}; get the file again"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        return backend, None
    if not (directory / "tokenizer.model").is_file():
        raise FileNotFoundError(
            f"expected {path} or tokenizer.model beside it, found neither; copy one of them there"
        )
    model = read_sentencepiece(directory / "tokenizer.model")
    # Configurations older than this field are of tokenizers made the old way.
    return sentencepiece_backend(model, legacy=config.get("legacy") is not False), model


def _eos_ids(eos: int | None, more: Any, where: str) -> tuple[int, ...]:
    """All end-of-text ids, the tokenizer's own first, each once."""
    listed: list[Any] = more if isinstance(more, list) else [] if more is None else [more]
    if not all(isinstance(i, int) and 0 <= i < 1 << 31 for i in listed):
        raise ValueError(f"expected eos_token_id to be ids, got {more!r} in {where}; mend it")
    own = [] if eos is None else [eos]
    ids = tuple(dict.fromkeys(own + listed))
    if not ids:
        raise ValueError(
            f"expected an EOS token, got none in {where}; name eos_token in tokenizer_config.json"
        )
    return ids


def _id(backend: Backend, name: str, token: Any) -> int | None:
    """The id of a token named in a configuration, as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise ValueError(f"expected {name}_token to be a text, got {token!r}; mend the file")
    return backend.token_to_id(text)


def _add_listed_tokens(backend: Backend, listed: Any) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json lacks."""
    try:
        rows = sorted((int(key), str(entry["content"]), entry) for key, entry in listed.items())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected added_tokens_decoder to list tokens by id, got another thing ({error}); "
            "mend tokenizer_config.json"
        ) from error
    for key, content, entry in rows:
        if backend.token_to_id(content) is None:
            flags = {k: bool(entry.get(k)) for k in ("special", "normalized", "lstrip", "rstrip")}
            backend.add_tokens([AddedToken(content, **flags)])
        got = backend.token_to_id(content)
        if got != key:
            raise ValueError(
                f"expected token {content!r} to have id {key}, got {got}; "
                "tokenizer.json and tokenizer_config.json belong to different tokenizers"
            )


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, else the configuration's; of several, "default"."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if value is None:
        value = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(value, str | None):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
        template = named.get("default")
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"expected chat_template to be a text or a list of named ones, got {error}; mend it"
        ) from error
    if not isinstance(template, str | None):
        raise ValueError("expected the default chat template to be a text; mend the file")
    return template


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
    """The object in a file, an empty one without it. Raises: ValueError when it is malformed."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}, got an error: {error}; mend it") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object in {path}, got {type(value).__name__}; mend it")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
