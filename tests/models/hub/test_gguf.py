"""GGUF files: names, quantised values, position scaling, heads put back in halves."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from purepost.models.hub import load
from purepost.models.hub.gguf import read_gguf
from purepost.models.hub.safetensors import read_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"
TABLE = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
TOKENS = sorted(TABLE["vocab"], key=TABLE["vocab"].get)[:288]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleaved(name: str, value: np.ndarray) -> np.ndarray:
    """llama.cpp's order of query and key rows: of each head, rows 0, k/2, 1, k/2 + 1, …"""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return value
    half = value.shape[0] // heads // 2
    order = [h * 2 * half + i + s * half for h in range(heads) for i in range(half) for s in (0, 1)]
    return value[order]


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None,
    **fields: Any,
) -> None:
    """A GGUF file of the golden tiny model's shape; `fields` are set beside or instead of it."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": 2048,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.freq_base": 500.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **fields,
    }
    for name, value in values.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges([m for m in TABLE["merges"] if m.replace(" ", "") in TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in tensors.items():
        if kind is None or value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_tensors() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The golden model's tensors by Hugging Face name, and as a GGUF file has them."""
    _, read = read_checkpoint(GOLDEN / "tiny-llama3")
    tensors = {name: read[name] for name in read}
    return tensors, {gguf_name(name): interleaved(name, x) for name, x in tensors.items()}


def llama3_factors(original: float, theta: float, factor: float) -> np.ndarray:
    """What frequencies are divided by, one at a time from the rule (low 1, high 4)."""
    out = []
    for i in range(8):
        wavelength = 2 * np.pi * theta ** (2 * i / 16)
        if wavelength < original / 4:
            out.append(1.0)
        elif wavelength > original:
            out.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_values_come_back_under_their_names(tmp_path: Path) -> None:
    expected, stored = tiny_tensors()
    write_gguf(tmp_path / "m.gguf", stored)
    found = read_gguf(tmp_path / "m.gguf")
    assert set(found.tensors) == set(expected) and len(found.tensors) == len(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found.tensors[name], value)
        assert found.tensors[name].dtype == np.float32
    config = found.config
    assert config["rope_theta"] == 500.0 and config["rms_norm_eps"] == 1e-5
    assert config["rope_scaling"] is None and not config["tie_word_embeddings"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["head_dim"], config["vocab_size"]) == (16, 288)
    assert found.tokenizer.eos_ids == (2,)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_types(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    _, stored = tiny_tensors()
    stored = {
        name: value if value.ndim == 1 or value.shape[1] % 32 == 0 else value[:, :32].copy()
        for name, value in stored.items()
    }
    stored["token_embd.weight"] = rng.normal(size=(288, 32)).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", stored, kind=type_)
    found = read_gguf(tmp_path / "m.gguf")
    got = found.tensors["model.embed_tokens.weight"]
    assert got.dtype == np.float32
    expected = dequantize(quantize(stored["token_embd.weight"], type_), type_)
    np.testing.assert_array_equal(got, expected)
    assert 0 < np.abs(got - stored["token_embd.weight"]).max() < 0.5


def test_a_loaded_file_equals_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    factors = {"rope_freqs.weight": llama3_factors(8192.0, 500000.0, 8.0)}
    theta: dict[str, Any] = {"rope.freq_base": 500000.0}
    write_gguf(tmp_path / "m.gguf", {**stored, **factors}, **theta)
    model, tokenizer = load(tmp_path / "m.gguf")
    original, _ = load(GOLDEN / "tiny-llama3")
    np.testing.assert_array_equal(model.layers.attention.q, original.layers.attention.q)
    np.testing.assert_array_equal(model.layers.mlp.down, original.layers.mlp.down)
    np.testing.assert_array_equal(model.head, original.head)
    scaling = model.config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("llama3", 8.0)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert scaling.original_max_positions == 8192
    assert tokenizer.vocab_size == 288


def test_embeddings_are_tied_when_there_is_no_output(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    del stored["output.weight"]
    write_gguf(tmp_path / "m.gguf", stored)
    model, _ = load(tmp_path / "m.gguf")
    assert model.head is None and model.config.tie_embeddings


def test_linear_position_scaling(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", stored, **scaling)
    found = load(tmp_path / "m.gguf").model.config.rope_scaling
    assert found is not None and (found.kind, found.factor) == ("linear", 4.0)


def test_what_is_not_supported_is_an_error(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("architecture 'llama', got 'gemma'", {"architecture": "gemma"}),
        ("mixture of experts", {"expert_count": 8}),
        ("rope.dimension_count to equal the head size 16, got 8", {"rope.dimension_count": 8}),
        ("yarn", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}),
    ]
    for i, (message, fields) in enumerate(cases):
        write_gguf(tmp_path / f"{i}.gguf", stored, **fields)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / f"{i}.gguf")
    none = {"rope_freqs.weight": llama3_factors(8192.0, 500.0, 8.0)}  # all 1: nothing to scale
    write_gguf(tmp_path / "none.gguf", {**stored, **none})
    assert load(tmp_path / "none.gguf").model.config.rope_scaling is None
    odd = {"rope_freqs.weight": np.linspace(1, 3, 8).astype(np.float32)}
    write_gguf(tmp_path / "odd.gguf", {**stored, **odd})
    with pytest.raises(ValueError, match="rope_freqs.weight to follow Llama 3's rule"):
        load(tmp_path / "odd.gguf")
    write_gguf(tmp_path / "more.gguf", {**stored, "blk.0.attn_new.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="unexpected blk.0.attn_new.weight"):
        load(tmp_path / "more.gguf")


def test_bad_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.gguf"):
        read_gguf(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no model" * 100)
    with pytest.raises(ValueError, match="expected a GGUF file at .*bad.gguf"):
        read_gguf(tmp_path / "bad.gguf")
