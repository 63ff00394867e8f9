"""Files that are damaged or mean harm: a clear error, whatever the bytes, and soon."""

import json
import shutil
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from purepost.models import Decoder
from purepost.models.hub import load, load_adapter
from purepost.models.hub.convert import decoder_from_tensors
from purepost.models.hub.documents import parse_config, parse_object
from purepost.models.hub.gguf_config import config_from_gguf
from purepost.models.hub.gguf_reader import read_header
from purepost.models.hub.safetensors import read_checkpoint, read_file, save_tensors
from tests.models.hub.gguf_files import GOLDEN, metadata, write_gguf

TINY = GOLDEN / "tiny-tied"
SOON = settings(deadline=timedelta(seconds=20), max_examples=60)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3),
    max_leaves=6,
)
# Bytes that are put in the place of others, and where to cut.
DAMAGE = st.tuples(
    st.lists(st.tuples(st.integers(0, 2**12), st.binary(min_size=1, max_size=9)), max_size=4),
    st.integers(0, 2**12) | st.none(),
)


def damaged(content: bytes, damage: tuple[list[tuple[int, bytes]], int | None]) -> bytes:
    out = bytearray(content)
    for at, new in damage[0]:
        start = at % len(out)
        out[start : start + len(new)] = new
    return bytes(out[: damage[1]])


def only_clear_errors(read: Any, *args: Any) -> None:
    """The function returns, or raises one of the errors that name what is wrong."""
    try:
        read(*args)
    except (ValueError, FileNotFoundError) as error:
        assert str(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture(scope="module")
def base() -> Decoder:
    return load(GOLDEN / "tiny-llama3").model


@pytest.fixture(scope="module")
def small_gguf(folder: Path) -> bytes:
    """A whole file with one small tensor."""
    config, _ = read_checkpoint(TINY)
    config["rope_theta"] = 1e4
    tensors = {"token_embd.weight": np.ones((288, 4), np.float32)}
    write_gguf(folder / "small.gguf", tensors, metadata(config))
    return (folder / "small.gguf").read_bytes()


def read_all(path: Path) -> None:
    tensors = read_file(path)
    for name in tensors:
        assert tensors[name].shape is not None


SMALL = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16)}


@SOON
@given(damage=DAMAGE)
@example(damage=([], 0))
@example(damage=([], 7))
@example(damage=([(0, struct.pack("<Q", 2**63))], None))
@example(damage=([(0, struct.pack("<Q", 10**8))], None))
def test_any_safetensors_bytes(folder: Path, damage: Any) -> None:
    save_tensors(folder / "good.safetensors", SMALL)
    path = folder / "bad.safetensors"
    path.write_bytes(damaged((folder / "good.safetensors").read_bytes(), damage))
    only_clear_errors(read_all, path)


def with_header(path: Path, header: str, data: bytes = bytes(24)) -> Path:
    content = header.encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def test_a_tensor_named_twice(tmp_path: Path) -> None:
    entry = '"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}'
    read_file(with_header(tmp_path / "a.safetensors", f"{{{entry}}}"))
    with pytest.raises(ValueError, match="the header of .*the key 'a' more than once|duplicate"):
        read_file(with_header(tmp_path / "b.safetensors", f"{{{entry}, {entry}}}"))


def test_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    entry = '{"a": {"dtype": "F4", "shape": [6, 8], "data_offsets": [0, 24]}}'
    with pytest.raises(
        ValueError, match="expected a in .*a.safetensors of a type among F64, .* F4"
    ):
        read_file(with_header(tmp_path / "a.safetensors", entry))


def test_a_tensor_of_whole_numbers(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "m")
    _, tensors = read_checkpoint(TINY)
    changed = {name: tensors[name] for name in tensors}
    changed["model.norm.weight"] = np.ones(32, np.int32)
    save_tensors(tmp_path / "m" / "model.safetensors", changed)
    with pytest.raises(ValueError, match="model.norm.weight of dtype int32, not a float"):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    "file",
    [
        *("../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", "", "x/y"),
        *("C:\\x.safetensors", "a\nb.safetensors", ".safetensors", "-\x00.safetensors", 3, None),
    ],
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, file: Any) -> None:
    shutil.copytree(TINY, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="the name of a .safetensors file beside"):
        load(tmp_path / "m")


@SOON
@given(value=st.fixed_dictionaries({}, optional={"weight_map": JSON, "metadata": JSON}) | JSON)
def test_any_index(folder: Path, value: Any) -> None:
    directory = folder / "index"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text(json.dumps(value))
    only_clear_errors(read_checkpoint, directory)


@SOON
@given(text=st.binary(max_size=40) | JSON.map(lambda x: json.dumps(x).encode()))
@example(text=b"[" * 100_000)
@example(text=b'{"a": ' * 100_000)
@example(text=b"9" * 5000)
@example(text=b"\xff{}")
@example(text=b"")
def test_any_json(text: bytes) -> None:
    only_clear_errors(parse_object, text, "config.json")


def test_json_that_says_a_thing_twice() -> None:
    with pytest.raises(
        ValueError, match="expected JSON in c.json, got: the key 'a' more than once"
    ):
        parse_object(b'{"b": {"a": 1, "a": 2}}', "c.json")
    with pytest.raises(ValueError, match=r"expected a JSON object in c.json, got \[1\]"):
        parse_object(b"[1]", "c.json")


CONFIG, TENSORS = read_checkpoint(TINY)


@SOON
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), JSON, min_size=1, max_size=3))
@example(changes={"num_hidden_layers": 4096})
@example(changes={"num_hidden_layers": 10**12})
@example(changes={"vocab_size": -1})
@example(changes={"hidden_size": 2**31 - 1, "num_attention_heads": 2**31 - 1})
@example(changes={"hidden_size": 2**19, "intermediate_size": 2**19, "vocab_size": 2**24})
@example(changes={"head_dim": 0})
@example(changes={"rms_norm_eps": "small"})
@example(changes={"model_type": ["llama"]})
@example(changes={"rope_parameters": {"rope_type": {}}})
def test_any_config(changes: dict[str, Any]) -> None:
    def read() -> None:
        family, config = parse_config({**CONFIG, **changes})
        decoder_from_tensors(config, TENSORS, family.names, None)

    only_clear_errors(read)


def test_a_config_without_what_it_needs() -> None:
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps"):
        with pytest.raises(ValueError, match=name):
            parse_config({key: value for key, value in CONFIG.items() if key != name})


@SOON
@given(damage=DAMAGE)
@example(damage=([], 0))
@example(damage=([], 20))
@example(damage=([(8, struct.pack("<Q", 2**62))], None))  # tensors
@example(damage=([(16, struct.pack("<Q", 2**62))], None))  # fields
@example(damage=([(24, struct.pack("<Q", 2**62))], None))  # the first name's length
@example(damage=([(4, struct.pack(">I", 3))], None))  # the other byte order
def test_any_gguf_bytes(folder: Path, small_gguf: bytes, damage: Any) -> None:
    path = folder / "bad.gguf"
    path.write_bytes(damaged(small_gguf, damage))
    only_clear_errors(read_header, path)


def gguf_bytes(*fields: tuple[str, int, bytes], tensors: bytes = b"", count: int = 0) -> bytes:
    """A file's header: fields as (name, kind, value)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, count, len(fields))
    for name, kind, value in fields:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    return out + tensors


def tensor(name: str, *axes: int, kind: int = 0, offset: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(axes))
    return head + b"".join(struct.pack("<Q", n) for n in axes) + struct.pack("<IQ", kind, offset)


STRINGS, FLOATS, ARRAYS = 8, 6, 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_bytes(("a", 9, struct.pack("<IQ", FLOATS, 2**60))), "ends early"),
        (gguf_bytes(("a", 9, struct.pack("<IQ", STRINGS, 2**60))), "array of 11529.* ends early"),
        (gguf_bytes(("a", 9, struct.pack("<IQ", ARRAYS, 1) * 2000)), "value of kind 9"),
        (gguf_bytes(("a", 77, b"")), "value of kind 77"),
        (gguf_bytes(("a", 4, bytes(4)), ("a", 4, bytes(4))), "'a' twice"),
        (gguf_bytes(("a", 8, struct.pack("<Q", 1) + b"\xff")), "utf-8"),
        (gguf_bytes(("general.alignment", 4, struct.pack("<I", 24))), "no power of two"),
        (gguf_bytes(tensors=tensor("t", 2**40, 2**40), count=1), "ends early"),
        (gguf_bytes(tensors=tensor("t", 8, offset=2**60), count=1), "ends early"),
        (gguf_bytes(tensors=tensor("t", 0), count=1), "of shape"),
        (gguf_bytes(tensors=tensor("t", 31, kind=2), count=1), "not in blocks of 32"),
        (gguf_bytes(tensors=tensor("t", *[1] * 5), count=1), "t of 5 axes"),
        (gguf_bytes(tensors=tensor("t", 1, kind=99), count=1), "99 is not a valid"),
        (gguf_bytes(tensors=tensor("t", 1) * 2, count=2), "'t' twice"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=f"expected a GGUF file at .*m.gguf, got .*{message}"):
        read_header(tmp_path / "m.gguf")


SCALARS = st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.booleans()
FIELDS = metadata({**CONFIG, "rope_theta": 1e4})
MORE = (
    *("rope.scaling.type", "rope.scaling.factor", "expert_count", "rope.dimension_count"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping"),
)


@SOON
@given(
    architecture=st.sampled_from(["llama", "qwen2", "qwen3moe", "gemma2", "gemma3"]),
    changes=st.dictionaries(
        st.sampled_from([*FIELDS, *MORE]), SCALARS | st.lists(SCALARS, max_size=3), max_size=4
    ),
    stretch=st.none() | st.lists(st.floats(width=32), min_size=1, max_size=9),
)
@example(architecture="gemma3", changes={"block_count": 2**62}, stretch=None)
@example(architecture="llama", changes={"attention.key_length": 2**62}, stretch=[2.0])
def test_any_metadata(architecture: str, changes: dict[str, Any], stretch: Any) -> None:
    fields = {f"{architecture}.{name}": value for name, value in {**FIELDS, **changes}.items()}
    fields["general.architecture"] = architecture
    factors = None if stretch is None else np.array(stretch, np.float32)

    def read() -> None:
        parse_config(config_from_gguf(fields, {"token_embd.weight": (288, 32)}, factors))

    only_clear_errors(read)


ADAPTER = json.loads((GOLDEN / "adapter" / "adapter_config.json").read_text())


@SOON
@given(changes=st.dictionaries(st.sampled_from(sorted(ADAPTER)), JSON, min_size=1, max_size=3))
@example(changes={"rank_pattern": {"(a|aa)+$": 2}})
@example(changes={"rank_pattern": {"(": 2}})
@example(changes={"rank_pattern": {"v_proj": "2"}})
@example(changes={"alpha_pattern": {".*" * 100: 2}})
@example(changes={"r": 2**70})
@example(changes={"r": -1})
@example(changes={"lora_dropout": 2.0})
def test_any_adapter_config(folder: Path, base: Decoder, changes: dict[str, Any]) -> None:
    directory = folder / "adapter"
    shutil.copytree(GOLDEN / "adapter", directory, dirs_exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    only_clear_errors(load_adapter, base, directory)


def test_patterns_that_would_take_for_ever(tmp_path: Path, base: Decoder) -> None:
    for i, pattern in enumerate((r"(\w+)+x", ".*" * 50 + "x", r"(.)\1*y")):
        shutil.copytree(GOLDEN / "adapter", tmp_path / str(i))
        config = {**ADAPTER, "rank_pattern": {pattern: 2}}
        (tmp_path / str(i) / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="expected simple patterns as rank_pattern"):
            load_adapter(base, tmp_path / str(i))


def test_an_adapter_for_another_model(tmp_path: Path) -> None:
    """The tiny models have the same names; smollm2's widths differ, and it has more layers."""
    shutil.copytree(TINY, tmp_path / "m")
    config = {**CONFIG, "num_hidden_layers": 1}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    kept = {name: TENSORS[name] for name in TENSORS if ".layers.1." not in name}
    save_tensors(tmp_path / "m" / "model.safetensors", kept)
    with pytest.raises(ValueError, match=r"unmatched key .*layers\.1\..*belongs to another model"):
        load_adapter(load(tmp_path / "m").model, GOLDEN / "adapter")
