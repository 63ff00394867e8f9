"""Whatever stands in a tokenizer's files, the readers give a tokenizer or a ValueError."""

import contextlib
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer as Backend
from tokenizers import models

from purepost.text import Tokenizer, render
from purepost.text.sentencepiece import parse_sentencepiece, sentencepiece_backend

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = [path.read_bytes() for path in sorted((GOLDEN / "spm").glob("*.model"))]
JSON = (GOLDEN / "tiny-tied" / "tokenizer.json").read_text(encoding="utf-8")
TEXT = "Hello  wörld ½ <sep> \n\n <s>"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)
)


def use(backend: Backend) -> None:
    backend.decode(backend.encode(TEXT).ids)


@given(st.sampled_from(MODELS), st.data())
@settings(max_examples=150)
def test_damaged_models_are_value_errors(model: bytes, data: st.DataObject) -> None:
    damaged = bytearray(model[: data.draw(st.integers(0, len(model)))] or model)
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=8)):
        damaged[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        use(sentencepiece_backend(parse_sentencepiece(bytes(damaged))))


@given(st.binary(max_size=200))
@settings(max_examples=150)
def test_bytes_of_any_kind_are_value_errors(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        use(sentencepiece_backend(parse_sentencepiece(data)))


NAMES = ["model", "tokens", "scores", "token_type", "merges", "pre", "bos_token_id"]
NAMES += ["eos_token_id", "padding_token_id", "eot_token_id", "add_bos_token", "add_space_prefix"]
TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "<0x41>"]
SOUND: dict[str, Any] = {
    "model": "llama",
    "tokens": TOKENS,
    "scores": [-float(i) for i in range(len(TOKENS))],
    "token_type": [2, 3, 3, 1, 1, 1, 1, 6],
    "merges": ["a b"],
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@given(
    st.sampled_from(["llama", "gpt2"]),
    st.dictionaries(
        st.sampled_from(NAMES),
        values
        | st.integers(-1, 9)
        | st.lists(st.sampled_from(TOKENS), max_size=9)
        | st.lists(st.integers(0, 7), min_size=8, max_size=8)
        | st.lists(st.floats(), min_size=8, max_size=8),
        max_size=3,
    ),
)
@settings(max_examples=300)
def test_fields_of_any_kind_are_value_errors(model: str, changed: dict[str, Any]) -> None:
    fields = {**SOUND, "model": model, **changed}
    with contextlib.suppress(ValueError):
        tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in fields.items()})
        use(tokenizer.backend)


@given(st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_directories_are_value_errors(tmp_path: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(JSON) - 1))
    cut = data.draw(st.sampled_from([JSON, JSON[:at], JSON[:at] + "0" + JSON[at + 1 :]]))
    (tmp_path / "tokenizer.json").write_text(cut, encoding="utf-8")
    config = st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("eos_token", "bos_token", "added_tokens_decoder", "chat_template", "add_bos_token"),
            values,
        )
        | {"eos_token_id": values | st.lists(st.integers(0, 300))},
    )
    for name in ("tokenizer_config", "special_tokens_map", "generation_config", "config"):
        written = json.dumps(data.draw(config | values))
        (tmp_path / f"{name}.json").write_text(written, encoding="utf-8")
    with contextlib.suppress(ValueError):
        use(Tokenizer.from_directory(tmp_path).backend)


@given(
    st.lists(
        st.sampled_from(
            "{{ }} {% %} {# #} for in if else set x m loop | ~ + ( ) [ ] . 'a'"
            " messages content macro endfor endif endset generation "
            "endgeneration 9 * ** namespace join tojson".split()
        ),
        max_size=25,
    )
)
@settings(max_examples=300)
def test_programs_of_any_kind_are_value_errors(words: list[str]) -> None:
    with contextlib.suppress(ValueError):
        render(" ".join(words), [{"role": "user", "content": "a"}], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "expected a tokenizer in"),
        ("tokenizer_config.json", "[1]", "expected an object in .*, got list"),
        ("tokenizer_config.json", '{"a": ', "expected JSON in"),
        ("tokenizer_config.json", "[" * 100_000, "expected JSON in"),
        ("tokenizer_config.json", '{"eos_token": 3}', "expected eos_token to be a text, got 3"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "to list tokens by id"),
        ("tokenizer_config.json", '{"chat_template": 3}', "expected chat_template to be a text"),
        ("generation_config.json", '{"eos_token_id": "x"}', "expected eos_token_id to be ids"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "expected eos_token_id to be ids"),
    ],
)
def test_malformed_directories_are_errors(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}', encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).eos_ids == (0,)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_a_panic_of_the_library_is_an_error(tmp_path: Path) -> None:
    changed = json.loads(JSON)
    changed["model"]["continuing_subword_prefix"] = "##"
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ValueError, match="expected a tokenizer in"):
        Tokenizer.from_directory(tmp_path)
