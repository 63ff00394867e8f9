"""`tokenizer.model` files against sentencepiece's ids (tests/golden/spm.py)."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from purepost.text import Tokenizer, encode_prompt
from purepost.text.sentencepiece import (
    parse_sentencepiece,
    read_sentencepiece,
    sentencepiece_backend,
)

GOLDEN = Path(__file__).parents[1] / "golden"
TABLE = json.loads((GOLDEN / "spm.json").read_text(encoding="utf-8"))
FOLDER = GOLDEN / "spm"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def field(number: int, value: int | float | bytes | str) -> bytes:
    """One field in the wire format."""
    match value:
        case int():
            return varint(number << 3) + varint(value)
        case float():
            return varint(number << 3 | 5) + struct.pack("<f", value)
        case str():
            return field(number, value.encode())
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    return field(1, field(1, text) + field(2, score) + field(3, kind))


HEAD = piece("<unk>", 0.0, 2) + piece("<s>", 0.0, 3) + piece("</s>", 0.0, 3)


@pytest.mark.parametrize("name", TABLE["models"])
def test_ids_and_texts_equal_sentencepiece(name: str) -> None:
    model = read_sentencepiece(FOLDER / f"{name}.model")
    backend = sentencepiece_backend(model)
    row = TABLE["models"][name]
    bos, eos, pad = row["special"]
    assert (model.bos_id, model.eos_id, model.pad_id) == (bos, eos, None if pad < 0 else pad)
    for text, ids, decoded in zip(TABLE["texts"], row["ids"], row["decoded"], strict=True):
        if name == "unigram" and "<0x0A>" in text:
            continue  # see unigram_model
        assert backend.encode(text, add_special_tokens=False).ids == ids, text
        if 0 not in ids:  # sentencepiece writes what is unknown as ⁇
            assert backend.decode(ids) == decoded, text


def test_bytes_of_the_tokens_are_the_bytes_of_the_text(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "bpe-bare.model", tmp_path / "tokenizer.model")
    tokenizer = Tokenizer.from_directory(tmp_path)
    table = tokenizer.token_bytes()
    for text in TABLE["texts"]:
        if "▁" not in text:
            assert b"".join(table[i] for i in tokenizer.encode(text)) == text.encode(), text


def test_a_directory_with_a_model_is_a_tokenizer(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "bpe-bare.model", tmp_path / "tokenizer.model")
    plain = Tokenizer.from_directory(tmp_path)
    assert (plain.bos_id, plain.eos_ids, plain.pad_id) == (2, (1,), 0)
    assert plain.adds_bos and plain.encode("a", add_special=True) == [2, *plain.encode("a")]
    end = plain.encode("<end>")[0]
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": True,
            "chat_template": "{{ bos_token }}{{ messages[0].content }}",
            "added_tokens_decoder": {str(end): {"content": "<end>", "special": True}},
        },
    )
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, end]})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == (1, end) and not tokenizer.adds_bos
    assert tokenizer.encode("a", add_special=True) == [*plain.encode("a"), 1]
    assert encode_prompt(tokenizer, [{"role": "user", "content": "a"}])[:1] == [2]


@pytest.mark.parametrize("name", ["bpe", "bpe-symbols", "bpe-bare", "unigram"])
def test_saved_and_read_it_is_the_same(name: str, tmp_path: Path) -> None:
    shutil.copy(FOLDER / f"{name}.model", tmp_path / "tokenizer.model")
    before = Tokenizer.from_directory(tmp_path)
    before.save(tmp_path / "saved")
    after = Tokenizer.from_directory(tmp_path / "saved")
    assert (after.bos_id, after.eos_ids, after.pad_id) == (
        before.bos_id,
        before.eos_ids,
        before.pad_id,
    )
    for text in TABLE["texts"]:
        assert after.encode(text, add_special=True) == before.encode(text, add_special=True), text


def test_the_space_before_text_after_special_tokens(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "bpe.model", tmp_path / "tokenizer.model")
    old = Tokenizer.from_directory(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"legacy": False})
    new = Tokenizer.from_directory(tmp_path)

    def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
        return [tokenizer.token(i) for i in tokenizer.encode(text)]

    assert tokens(old, "</s>a</s>")[1] == "▁a" and tokens(new, "</s>a</s>")[1] == "a"
    assert tokens(old, "a") == tokens(new, "a") == ["▁a"]


def test_options_of_the_model_are_read() -> None:
    model = parse_sentencepiece(
        HEAD
        + piece("▁a", -1.5)
        + field(2, field(3, 2) + field(35, 1) + field(41, 2) + field(42, 1) + field(43, 2**64 - 1))
        + field(3, field(1, "identity") + field(3, 0) + field(4, 0))
        + field(9, b"unknown fields are skipped")
    )
    assert model.pieces.texts == ["<unk>", "<s>", "</s>", "▁a"]
    assert model.pieces.scores == [0.0, 0.0, 0.0, -1.5]
    assert (model.kind, model.byte_fallback, model.prefix, model.strips) == (2, True, False, False)
    assert (model.bos_id, model.eos_id, model.pad_id) == (2, 1, None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected pieces, got none"),
        (HEAD[:-1], "more bytes, got"),
        (HEAD + b"\x80", "expected the rest of a number"),
        (HEAD + b"\xff" * 10, "at most 10 bytes"),
        (HEAD + b"\x0b", "expected a wire type"),
        (HEAD + b"\x0a\xff\xff\xff\xff\x7f", "expected 34359738367 more bytes"),
        (HEAD + piece("<s>"), "expected token 3 to be one of its own, got '<s>', as token 1"),
        (HEAD + piece(""), "expected token 3 to be one of its own, got nothing"),
        (HEAD + piece("a", float("nan")), "expected a finite score"),
        (HEAD + field(1, field(2, b"ab")), "expected a finite score"),
        (HEAD + field(1, 7), "expected bytes in a field, got a number"),
        (HEAD + field(2, field(3, b"x")), "expected a number in a field, got bytes"),
        (HEAD + field(1, field(1, b"\xff")), "utf-8"),
        (HEAD + field(2, field(42, 99)), "expected special ids below 3, got 99"),
        (HEAD + field(2, field(3, 4)), "expected a unigram or BPE model"),
        (HEAD + field(3, field(5, 0)), "expected a unigram or BPE model"),
        (HEAD + field(3, field(2, b"\0\4\0\0" + b"\0" * 9)), "sound table of replacements"),
        (HEAD + field(3, field(2, b"\0\4\0\0" + b"\0\xfc\xff\x7f" * 256 + b"\0")), "sound table"),
        (piece("a") + piece("b") + piece("c"), "expected a token for what is unknown"),
    ],
)
def test_malformed_models_are_errors(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        sentencepiece_backend(read_sentencepiece(tmp_path / "tokenizer.model"))


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected .*tokenizer.model, found none"):
        read_sentencepiece(tmp_path / "tokenizer.model")
