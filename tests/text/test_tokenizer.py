"""Tokenizers against transformers' (tests/golden/make.py), and what they know of their tokens."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from purepost.text import Tokenizer
from purepost.text.gguf_vocab import PATTERNS, backend_from_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
TABLE = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
TOKENS = sorted(TABLE["vocab"], key=TABLE["vocab"].get)


def byte_level_fields(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """The fields of a GGUF file with the golden vocabulary."""
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": TABLE["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    named = {} if pre is None else {"tokenizer.ggml.pre": pre}
    return {**fields, **named, **{f"tokenizer.ggml.{k}": v for k, v in more.items()}}


def words(backend: Backend, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_smollm2_ids_and_text_equal_transformers(smollm2: Tokenizer) -> None:
    for text, ids, decoded in zip(TABLE["texts"], TABLE["smollm2"], TABLE["decoded"], strict=True):
        assert smollm2.encode(text) == ids, text
        assert smollm2.decode(ids) == decoded, text
        assert smollm2.decode(np.array(ids, np.int32), skip_special=False) == text


def test_smollm2_special_ids(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.pad_id) == (1, (2,), 2)
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert not smollm2.adds_bos
    assert smollm2.token(2) == "<|im_end|>"


def test_bytes_of_the_tokens_are_the_bytes_of_the_text(smollm2: Tokenizer) -> None:
    table = smollm2.token_bytes()
    assert len(table) == 49152
    for text, ids in zip(TABLE["texts"], TABLE["smollm2"], strict=True):
        assert b"".join(table[i] for i in ids) == text.encode(), text


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_byte_level_ids_equal_transformers(pre: str) -> None:
    backend = backend_from_gguf(byte_level_fields(pre))
    for text, ids in zip(TABLE["texts"], TABLE["ids"][pre], strict=True):
        assert backend.encode(text).ids == ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_words_equal_those_of_the_published_pattern(pre: str) -> None:
    backend = backend_from_gguf(byte_level_fields(pre))
    for text, expected in zip(TABLE["texts"], TABLE["words"][pre], strict=True):
        assert words(backend, text) == expected, text


def test_a_file_without_a_pre_tokenizer_has_the_default_one() -> None:
    unnamed = backend_from_gguf(byte_level_fields(None))
    named = backend_from_gguf(byte_level_fields("default"))
    text = "It's 12345+x, (yes)"
    # Punctuation is cut off first, then GPT-2's words, then digits by three from the left.
    expected = ["It", "'", "s", " ", "123", "45", "+", "x", ",", " ", "(", "yes", ")"]
    assert words(unnamed, text) == words(named, text) == expected


def test_an_unknown_pre_tokenizer_or_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected tokenizer.ggml.pre .*got 'tekken'"):
        backend_from_gguf(byte_level_fields("tekken"))
    with pytest.raises(ValueError, match="expected tokenizer.ggml.model .*got 'bert'"):
        backend_from_gguf({**byte_level_fields(), "tokenizer.ggml.model": "bert"})
    with pytest.raises(ValueError, match="expected tokenizer.ggml.tokens"):
        backend_from_gguf({"tokenizer.ggml.model": "gpt2"})
    assert "tekken" not in PATTERNS


def test_merges_of_pieces_whose_spaces_are_written() -> None:
    """As Gemma 4's: the merges say what is joined, in their order; what has no piece is bytes."""
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abc"]
    tokens += ["ab", "▁ab", "bc", "<turn|>"]
    kinds = [3] * 3 + [6] * 256 + [1] * 7 + [3]
    fields = byte_level_fields(None, tokens=tokens, token_type=kinds, model="gemma4")
    fields |= {"tokenizer.ggml.merges": ["b c", "a b", "▁ ab"]}
    fields |= {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1}
    tokenizer = Tokenizer.from_gguf(fields)
    named = lambda text: [tokens[i] for i in tokenizer.encode(text)]  # noqa: E731
    assert named("ab ab") == ["ab", "▁ab"]
    assert named(" abc<turn|>") == ["▁", "a", "bc", "<turn|>"]
    assert named("é b") == ["<0xC3>", "<0xA9>", "▁", "b"]
    assert tokenizer.encode("a", add_special=True) == [2, tokens.index("a")]
    for text in ("ab ab", " é  cab"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_is_added_where_the_file_says_so() -> None:
    plain = Tokenizer.from_gguf(byte_level_fields())
    adding = Tokenizer.from_gguf(byte_level_fields(add_bos_token=True))
    assert not plain.adds_bos and adding.adds_bos
    assert adding.encode("Hi", add_special=True) == [1, *plain.encode("Hi")]
    assert adding.encode("Hi") == plain.encode("Hi") == plain.encode("Hi", add_special=True)


def test_end_of_turn_ids_of_a_gguf_file_are_eos_too() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(eot_token_id=0))
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.pad_id == 2
    assert Tokenizer.from_gguf(byte_level_fields(padding_token_id=10**6)).pad_id == 2
    fields = byte_level_fields()
    del fields["tokenizer.ggml.eos_token_id"]
    assert Tokenizer.from_gguf(fields).eos_ids == (2,)  # <|im_end|>, by its name
    fields["tokenizer.ggml.token_type"] = [1] * len(TOKENS)
    with pytest.raises(ValueError, match="expected an EOS token"):
        Tokenizer.from_gguf(fields)


def score_merge(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as it is defined: merge the neighbours whose piece scores highest."""
    pieces = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        scored = [(score, i) for score, i in pairs if score is not None]
        if not scored:
            return pieces
        i = -max(scored)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def sentencepiece_fields() -> dict[str, Any]:
    pieces = "▁ a b c d ab bc abc ▁a ▁ab cd abcd ▁abc ca ▁d".split()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [2, 3, 3, *([6] * 256), *([1] * len(pieces))]
    order = [0, 9, 3, 8, 1, 2, 7, 4, 6, 5, 14, 10, 11, 12, 13]
    scores = [0.0] * 259 + [-float(rank) for rank in order]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_merges_by_score() -> None:
    fields = sentencepiece_fields()
    tokenizer = Tokenizer.from_gguf(fields)
    scores = {
        token: score
        for token, score in zip(
            fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True
        )
        if len(token) > 1 and not token.startswith("<")
    }
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(rng.choice(list("abcd "), 12))
        expected = score_merge("▁" + text.replace(" ", "▁"), scores)
        assert [tokenizer.token(i) for i in tokenizer.encode(text)] == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.adds_bos  # the default of this kind of vocabulary
    assert tokenizer.encode("ab", add_special=True)[0] == 1


def test_sentencepiece_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    ids = tokenizer.encode("abé")
    assert [tokenizer.token(i) for i in ids] == ["▁ab", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "abé"
    table = tokenizer.token_bytes()
    assert [table[i] for i in ids] == [b" ab", b"\xc3", b"\xa9"]
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.scores"] = fields["tokenizer.ggml.scores"][:-1]
    with pytest.raises(ValueError, match="each of 274 tokens, got 273 and 274"):
        Tokenizer.from_gguf(fields)


def test_gemma_vocabularies_of_gguf_files() -> None:
    """As its files have them: no space before text, runs of spaces and lines as symbols."""
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.tokens"] += ["<end_of_turn>", "\n", "\n\n", "  ", "   ", "ab>"]
    fields["tokenizer.ggml.token_type"] += [3, 4, 4, 4, 4, 4]
    fields["tokenizer.ggml.scores"] += [-1000.0] * 6
    fields["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = Tokenizer.from_gguf(fields)
    text = "ab  cd   a\n\n\nab> d<end_of_turn>\n"
    ids = tokenizer.encode(text, add_special=True)
    assert [tokenizer.token(i) for i in ids] == (
        ["<s>", "ab", "  ", "cd", "   ", "a", "\n\n", "\n", "ab>", "▁d", "<end_of_turn>", "\n"]
    )
    assert tokenizer.decode(ids[1:], skip_special=False) == text
    table = tokenizer.token_bytes()
    assert b"".join(table[i] for i in ids[1:]) == text.encode()
    assert tokenizer.eos_ids == (2, 274)  # the end of a turn by its name
    assert tokenizer.encode("<s>ab", add_special=True) == tokenizer.encode("ab", add_special=True)
    fields["tokenizer.ggml.tokens"][-1] = "ab"
    with pytest.raises(ValueError, match="expected token 279 to be one of its own, got 'ab', as"):
        Tokenizer.from_gguf(fields)


def test_other_vocabularies_have_no_bytes() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="expected a byte-level or SentencePiece tokenizer"):
        Tokenizer(backend, None, (1,), 1, None).token_bytes()


def test_save_and_read_give_the_same_tokenizer(tmp_path: Path) -> None:
    fields = byte_level_fields("qwen2", eot_token_id=0, add_bos_token=True)
    before = Tokenizer.from_gguf({**fields, "tokenizer.chat_template": "{{ messages }}"})
    before.save(tmp_path)
    after = Tokenizer.from_directory(tmp_path)
    assert (after.bos_id, after.eos_ids, after.pad_id) == (1, (2, 0), 2)
    assert after.chat_template == "{{ messages }}" and after.adds_bos
    for text in TABLE["texts"]:
        assert after.encode(text, add_special=True) == before.encode(text, add_special=True)


@pytest.mark.parametrize("flags", range(16))
def test_flags_of_added_tokens_survive(flags: int, tmp_path: Path) -> None:
    names = ("lstrip", "rstrip", "normalized", "special")
    given = {name: bool(flags >> i & 1) for i, name in enumerate(names)}
    before = Tokenizer.from_gguf(byte_level_fields("qwen2"))
    before.backend.add_tokens([AddedToken("<Tok>", **given)])
    before.save(tmp_path)
    after = Tokenizer.from_directory(tmp_path)
    end = after.backend.token_to_id("<Tok>")
    assert end is not None
    kept = after.backend.get_added_tokens_decoder()[end]
    assert repr(kept) == repr(AddedToken("<Tok>", single_word=False, **given))
    text = "a  <Tok>  b"
    assert after.encode(text) == before.encode(text) and end in after.encode(text)
    assert (end in after.special_ids) == given["special"]


def test_the_configuration_says_what_stands_around_a_text(tmp_path: Path) -> None:
    Tokenizer.from_gguf(byte_level_fields()).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    plain = Tokenizer.from_directory(tmp_path).encode("Hi")

    def around(text: str, **said: Any) -> list[int]:
        write_json(tmp_path / "tokenizer_config.json", {**config, **said})
        return Tokenizer.from_directory(tmp_path).encode(text, add_special=True)

    bos, eos = config["bos_token"], config["eos_token"]
    assert around("Hi") == plain
    assert around("Hi", add_bos_token=True) == [1, *plain]
    assert around(bos + "Hi", add_bos_token=True) == [1, *plain]  # once, not twice
    assert around(bos + "Hi") == [1, *plain]
    assert around("Hi", add_bos_token=True, add_eos_token=True) == [1, *plain, 2]
    assert around("Hi", add_bos_token=True, bos_token=None) == plain
    assert eos == "<|im_end|>"


def test_a_file_that_cuts_and_pads_does_neither_here(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields())
    tokenizer.save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    for text in TABLE["texts"]:
        assert Tokenizer.from_directory(tmp_path).encode(text) == tokenizer.encode(text)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_reads_every_spelling_of_a_directory(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "</s>": 1, "<s>": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "a"})
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "eos_token": {"content": "</s>", "lstrip": False},
            "added_tokens_decoder": {"3": {"content": "<|end|>", "special": True}},
            "chat_template": [
                {"name": "tool_use", "template": "tools"},
                {"name": "default", "template": "plain"},
            ],
        },
    )
    write_json(tmp_path / "config.json", {"eos_token_id": 0})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (2, (1, 0), 1)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.encode("a<|end|>") == [0, 3]
    write_json(tmp_path / "chat_template.json", {"chat_template": "unused, as one is there"})
    assert Tokenizer.from_directory(tmp_path).chat_template == "plain"
    # The generation's own list of stops counts before the model's; a template file before a field.
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 3]})
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == (1, 3)
    assert tokenizer.chat_template == "file"


def test_bad_directories_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected .*tokenizer.json or .*, found neither"):
        Tokenizer.from_directory(tmp_path)
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="expected an EOS token, got none"):
        Tokenizer.from_directory(tmp_path)
    listed = {"7": {"content": "<x>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": listed})
    with pytest.raises(ValueError, match="expected token '<x>' to have id 7, got 1"):
        Tokenizer.from_directory(tmp_path)
