"""GGUF files: every family's names and settings, quantised values, position scaling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import gguf
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from purepost.models import Config, Decoder, RopeScaling, init_decoder
from purepost.models.hub import load, save
from purepost.models.hub.families import FAMILIES
from purepost.models.hub.gguf import read_gguf
from purepost.models.hub.gguf_config import config_from_gguf
from purepost.models.hub.gguf_reader import Stored
from purepost.models.hub.safetensors import read_checkpoint
from purepost.models.layers import gelu
from purepost.text import Tokenizer
from tests.models.hub.gguf_files import (
    ARCHITECTURES,
    GOLDEN,
    metadata,
    stored_tensors,
    write_gguf,
)

TINY: dict[str, Any] = {
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
}
YARN: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


def tiny_tensors() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The golden model's tensors by Hugging Face name, and as a GGUF file has them."""
    config, read = read_checkpoint(GOLDEN / "tiny-llama3")
    tensors = {name: read[name] for name in read}
    return tensors, stored_tensors(config, tensors)


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
    write_gguf(tmp_path / "m.gguf", stored, TINY)
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
    write_gguf(tmp_path / "m.gguf", stored, TINY, kind=type_)
    found = read_gguf(tmp_path / "m.gguf")
    got = found.tensors["model.embed_tokens.weight"]
    assert got.dtype == np.float32
    expected = dequantize(quantize(stored["token_embd.weight"], type_), type_)
    np.testing.assert_array_equal(got, expected)
    assert 0 < np.abs(got - stored["token_embd.weight"]).max() < 0.5


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_k_quants_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any bytes (small ones: finite scales), some at a time and all at once."""
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    bytes_ = np.random.default_rng(0).integers(0, 60, (2, 3, 4 * size)).astype(np.uint8)
    monkeypatch.setattr("purepost.models.hub.gguf_reader._AT_ONCE", 5 * block)
    got = Stored(type_, (2, 3, 4 * block), bytes_).values()
    np.testing.assert_array_equal(got, dequantize(bytes_, type_))
    assert np.abs(got).max() > 0


def test_a_loaded_file_equals_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    factors = {"rope_freqs.weight": llama3_factors(8192.0, 500000.0, 8.0)}
    fields = {**TINY, "rope.freq_base": 500000.0}
    write_gguf(tmp_path / "m.gguf", {**stored, **factors}, fields)
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
    write_gguf(tmp_path / "m.gguf", stored, TINY)
    model, _ = load(tmp_path / "m.gguf")
    assert model.head is None and model.config.tie_embeddings


def test_linear_position_scaling(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", stored, {**TINY, **scaling})
    found = load(tmp_path / "m.gguf").model.config.rope_scaling
    assert found is not None and (found.kind, found.factor) == ("linear", 4.0)


def test_yarn(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    scaling = {**YARN, "rope.scaling.original_context_length": 512}
    write_gguf(tmp_path / "m.gguf", stored, {**TINY, **scaling})
    found = load(tmp_path / "m.gguf").model.config.rope_scaling
    assert found is not None
    assert (found.kind, found.factor, found.original_max_positions) == ("yarn", 4.0, 512)


# Heads, widths and layers that all differ; what llama.cpp knows by the architecture is at its value
# there (Gemma 2 and 3: the windows' pattern, the scale of attention).
SHAPE = Config(288, 24, 40, 3, 4, 2, 8, max_positions=256, norm_eps=1e-6, rope_theta=700.0)
GEMMA: dict[str, Any] = {"norm_offset": 1.0, "embed_scale": 24**0.5, "activation": gelu}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_embeddings": False},
    "mistral": {"windows": (12,) * 3},
    "qwen2": {"qkv_bias": True, "head_dim": 6},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {
        **{"qk_norm": True, "tie_embeddings": False, "intermediate_size": 16},
        **{"num_experts": 5, "experts_per_token": 2, "normalize_experts": True},
    },
    "gemma": {**GEMMA, "num_kv_heads": 1},
    "gemma2": {
        **{**GEMMA, "post_norms": True, "windows": (12, None, 12), "query_scale": 8**-0.5},
        **{"attention_softcap": 20.0, "final_softcap": 5.0},
    },
    "gemma3_text": {
        **{**GEMMA, "post_norms": True, "qk_norm": True, "query_scale": 8**-0.5},
        **{"num_layers": 7, "windows": (12,) * 5 + (None, 12), "window_rope_theta": 10000.0},
    },
    "gemma4_text": {
        **{**GEMMA, "norm_offset": 0.0, "post_norms": True, "qk_norm": True, "value_norm": True},
        **{"query_scale": 1.0, "layer_scale": True, "num_layers": 6, "final_softcap": 5.0},
        **{"windows": (12, 12, None) * 2, "window_rope_theta": 50.0, "full_head_dim": 16},
        **{"full_kv_heads": 1, "full_keys_as_values": True, "shared_kv_layers": 3},
        **{"wide_shared_mlp": True, "layer_input_size": 4, "layer_input_vocab": 30},
        "rope_scaling": RopeScaling("proportional", 1.0, rotated=0.25),
    },
}


def random_decoder(config: Config) -> Decoder:
    """Weights in 64ths, which 1 can be added to and taken from without rounding."""
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(-64, 65, x.shape) / 64, x.dtype), shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_what_its_checkpoint_is(tmp_path: Path, family: str) -> None:
    model = random_decoder(replace(SHAPE, family=family, **SHAPES[family]))
    save(model, Tokenizer.from_directory(GOLDEN / "tiny-tied"), tmp_path / "hf")
    config, tensors = read_checkpoint(tmp_path / "hf")
    stored = stored_tensors(config, {name: tensors[name] for name in tensors})
    fields = metadata(config)
    if family == "gemma4_text":  # of 8 pairs in a head 2 turn
        stored["rope_freqs.weight"] = np.array([1, 1, *[1e30] * 6], np.float32)
    if family == "mistral":  # not in the converter's files, but some have it
        fields["attention.sliding_window"] = 12
    write_gguf(tmp_path / "m.gguf", stored, fields, architecture=ARCHITECTURES[family])
    found, original = (load(tmp_path / name).model for name in ("m.gguf", "hf"))
    assert found.config == original.config == model.config
    assert jax.tree.structure(found) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_llama_cpp_knows_of_the_largest_gemmas() -> None:
    """27B: 46 layers of 4608/32 = 144 (Gemma 2), 62 of 5376/32 = 168 (Gemma 3)."""
    for architecture, layers, hidden, scalar in (
        ("gemma2", 46, 4608, 144),
        ("gemma3", 62, 5376, 168),
        ("gemma3", 26, 1152, 128),
    ):
        sizes = {"embedding_length": hidden, "block_count": layers, "attention.key_length": 128}
        fields = {**TINY, **sizes, "attention.value_length": 128, "attention.head_count": 32}
        named = {f"{architecture}.{name}": value for name, value in fields.items()}
        shapes = {"token_embd.weight": (288, hidden)}
        config = config_from_gguf(named | {"general.architecture": architecture}, shapes, None)
        assert config["query_pre_attn_scalar"] == scalar
        assert len(config["layer_types"]) == layers
        full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
        period = 2 if architecture == "gemma2" else 6
        assert full == list(range(period - 1, layers, period))


def test_windows_that_the_file_lists() -> None:
    fields = {f"gemma3.{name}": value for name, value in TINY.items()}
    fields["general.architecture"] = "gemma3"
    shapes = {"token_embd.weight": (288, 32)}
    for pattern, expected in ((2, "sf"), ([True, False], "sf"), ([0, 1], "fs"), (1, "ff")):
        fields["gemma3.attention.sliding_window_pattern"] = pattern
        types = config_from_gguf(fields, shapes, None)["layer_types"]
        assert "".join(kind[0] for kind in types) == expected
    fields["gemma3.attention.sliding_window_pattern"] = [True]
    with pytest.raises(ValueError, match="expected 2 layers as gemma3.attention.sliding_window_p"):
        config_from_gguf(fields, shapes, None)


def test_what_is_not_supported_is_an_error(tmp_path: Path) -> None:
    _, stored = tiny_tensors()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("mixture of experts", {"expert_count": 8}),
        ("the head size 16 as llama.rope.dimension_count .*, got 8", {"rope.dimension_count": 8}),
        ("longrope", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}),
        ("expected 1 as llama.rope.scaling.attn_factor", YARN | {"rope.scaling.attn_factor": 2.0}),
    ]
    for i, (message, fields) in enumerate(cases):
        write_gguf(tmp_path / f"{i}.gguf", stored, {**TINY, **fields})
        with pytest.raises(ValueError, match=message):
            load(tmp_path / f"{i}.gguf")
    write_gguf(tmp_path / "phi.gguf", stored, TINY, architecture="phi3")
    with pytest.raises(ValueError, match="architecture 'llama', .*'gemma4', got 'phi3'"):
        load(tmp_path / "phi.gguf")
    none = {"rope_freqs.weight": llama3_factors(8192.0, 500.0, 8.0)}  # all 1: nothing to scale
    write_gguf(tmp_path / "none.gguf", {**stored, **none}, TINY)
    assert load(tmp_path / "none.gguf").model.config.rope_scaling is None
    odd = {"rope_freqs.weight": np.linspace(1, 3, 8).astype(np.float32)}
    write_gguf(tmp_path / "odd.gguf", {**stored, **odd}, TINY)
    with pytest.raises(ValueError, match="rope_freqs.weight to follow Llama 3's rule"):
        load(tmp_path / "odd.gguf")
    more = {**stored, "blk.0.attn_new.weight": np.ones(3, np.float32)}
    write_gguf(tmp_path / "more.gguf", more, TINY)
    with pytest.raises(ValueError, match="unexpected blk.0.attn_new.weight"):
        load(tmp_path / "more.gguf")
    write_gguf(tmp_path / "bias.gguf", stored | {"blk.0.attn_q.bias": np.ones(64, "f")}, TINY)
    with pytest.raises(ValueError, match="expected no biases in a llama"):
        load(tmp_path / "bias.gguf")


def test_bad_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.gguf"):
        read_gguf(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no model" * 100)
    with pytest.raises(ValueError, match="expected a GGUF file at .*bad.gguf"):
        read_gguf(tmp_path / "bad.gguf")
