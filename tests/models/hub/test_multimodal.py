"""The text models of checkpoints that read images as well (tests/golden/multimodal.py)."""

import json
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.models import Decoder, RopeScaling
from purepost.models.hub import load, load_adapter, save, save_adapter
from purepost.models.hub.documents import parse_config
from purepost.models.hub.multimodal import MULTIMODAL, text_config
from purepost.models.hub.safetensors import read_checkpoint, read_file, save_tensors
from purepost.types import Rows, causal_rows
from purepost.weights import add_lora

GOLDEN = Path(__file__).parents[2] / "golden"
EVERY = pytest.mark.parametrize("name", list(MULTIMODAL))


def copied(path: Path, name: str, tensors: dict[str, np.ndarray], **fields: Any) -> Path:
    """The checkpoint with other tensors, and with some fields of config.json changed."""
    shutil.copytree(GOLDEN / name, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    save_tensors(path / "model.safetensors", tensors)
    return path


def stored(name: str) -> dict[str, np.ndarray]:
    _, tensors = read_checkpoint(GOLDEN / name)
    return {name: tensors[name] for name in tensors}


def renamed(tensors: dict[str, np.ndarray], *, early: bool) -> dict[str, np.ndarray]:
    """By the names of the first checkpoints, or by those of transformers' modules since."""
    out: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.").replace("language_model.model.", "language_model.")
        bare = bare.removeprefix("language_model.") if "lm_head" in name else bare
        if early and bare.startswith(("language_model.", "lm_head.")):
            inner = bare.removeprefix("language_model.")
            bare = f"language_model.{inner if 'lm_head' in inner else 'model.' + inner}"
        elif not early and not bare.startswith("lm_head."):
            bare = f"model.{bare}"
        out[bare] = tensor
    return out


def assert_same(a: Decoder, b: Decoder) -> None:
    assert a.config == b.config
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@eqx.filter_jit
def logits_at(model: Decoder, rows: Rows, positions: jax.Array) -> jax.Array:
    return model.unembed(jnp.take_along_axis(model(rows)[0], positions[..., None], 1))


@EVERY
def test_text_alone_has_transformers_logits(name: str) -> None:
    golden, model = np.load(GOLDEN / f"{name}.npz"), load(GOLDEN / name).model
    assert model.config.family == MULTIMODAL[name]["model_type"]
    rows = causal_rows(jnp.asarray(golden["ids"]), jnp.asarray(golden["lengths"]))
    got = logits_at(model, rows, jnp.asarray(golden["positions"]))
    np.testing.assert_allclose(got, golden["logits"], rtol=0, atol=1e-4)
    assert np.std(golden["logits"]) > 0.3


@EVERY
def test_both_namings_are_read(name: str, tmp_path: Path) -> None:
    model = load(GOLDEN / name, dtype=None).model
    for early in (True, False):
        tensors = renamed(stored(name), early=early)
        norm = "language_model.model.norm.weight" if early else "model.language_model.norm.weight"
        assert norm in tensors and any("vision_tower" in key for key in tensors)
        assert ("lm_head.weight" in tensors) == (name == "mistral3" and not early)
        assert_same(load(copied(tmp_path / str(early), name, tensors), dtype=None).model, model)


@EVERY
def test_it_is_saved_as_a_model_of_text(name: str, tmp_path: Path) -> None:
    model, tokenizer = load(GOLDEN / name, dtype=None)
    save(model, tokenizer, tmp_path / "model")
    config, tensors = read_checkpoint(tmp_path / "model")
    assert config["model_type"] == MULTIMODAL[name]["model_type"]
    assert config["architectures"][0].endswith("ForCausalLM") and "text_config" not in config
    assert all(
        key.startswith(("model.layers.", "model.embed", "model.norm", "lm_head")) for key in tensors
    )
    assert_same(load(tmp_path / "model", dtype=None).model, model)


def test_what_belongs_to_no_part_is_an_error(tmp_path: Path) -> None:
    tensors, extra = stored("gemma3"), np.ones(3, np.float32)
    for i, key in enumerate(("model.ears.weight", "model.language_model.layers.0.mlp.bias")):
        path = copied(tmp_path / str(i), "gemma3", {**tensors, key: extra})
        plain = key.replace("language_model.", "")
        with pytest.raises(ValueError, match=f"got 1 that differ: unexpected {plain}"):
            load(path)
    names = ("language_model.model.norm.weight", "model.language_model.norm.weight")
    twice = {**tensors, **dict.fromkeys(names, extra)}
    with pytest.raises(ValueError, match="expected model.norm.weight once in the checkpoint"):
        load(copied(tmp_path / "twice", "gemma3", twice))
    for field in ("quantization_config", "attention_multiplier"):
        path = copied(tmp_path / field, "gemma3", tensors, **{field: {"bits": 4}})
        with pytest.raises(ValueError, match=f"(expected|got) {field} = "):
            load(path)


def test_a_text_config_that_leaves_out_what_is_usual() -> None:
    """As google/gemma-3-4b-it has it."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        **{"boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106]},
        **{"image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256},
        "model_type": "gemma3",
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    _, found = parse_config(text_config(config))
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (262208, 2560, 34)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert (found.rope_theta, found.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert found.windows[4:7] == (1024, None, 1024) and found.window_rope_theta == 1e4
    assert found.tie_embeddings and found.query_scale == 1 / 16 and found.max_positions == 131072
    untied = parse_config(text_config({**config, "tie_word_embeddings": False}))[1]
    assert not untied.tie_embeddings  # as the whole model says


def test_adapters_of_the_whole_model_fit_its_text(tmp_path: Path) -> None:
    """PEFT names what it adapted by the modules of the whole model."""
    model = load(GOLDEN / "gemma3").model
    adapted = add_lora(model, where=r"attention\.q$", rank=2, key=jax.random.key(0))
    save_adapter(adapted, tmp_path / "adapter", base="gemma3")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    plain = read_file(path)
    inner = "base_model.model.model."
    whole = {name.replace(inner, f"{inner}language_model."): plain[name] for name in plain}
    save_tensors(path, whole)
    assert all(".language_model.layers." in name for name in read_file(path))
    assert_same(load_adapter(model, tmp_path / "adapter"), adapted)
