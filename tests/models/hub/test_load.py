"""Models in and out: conversions (case 17), tied embeddings (case 11), what does not fit (18)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest

from purepost.models import Config, Decoder, init_decoder
from purepost.models.hub import load, save
from purepost.models.hub.safetensors import read_checkpoint, save_tensors
from purepost.text import Tokenizer
from purepost.tree import map_named
from purepost.weights import add_lora, has_adapters, merge

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(GOLDEN / "tiny-tied")


def tiny(*, tie: bool, layers: int = 2) -> Decoder:
    """Four query and two key heads of width 4 on a stream of width 4."""
    config = Config(288, 4, 6, layers, 4, 2, 4, tie_embeddings=tie, rope_theta=500.0)
    return random_decoder(config)


def random_decoder(config: Config) -> Decoder:
    """Random weights by NumPy: nothing to compile."""
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


def rewrite(directory: Path, edit: dict[str, np.ndarray | None]) -> None:
    """Replace, add or (None) take away tensors of a checkpoint."""
    _, tensors = read_checkpoint(directory)
    changed = {**{name: tensors[name] for name in tensors}, **edit}
    kept = {name: value for name, value in changed.items() if value is not None}
    save_tensors(directory / "model.safetensors", kept)


def assert_equal(a: Decoder, b: Decoder) -> None:
    assert a.config == b.config
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("tie", [True, False])
def test_saved_and_loaded_is_the_same(tmp_path: Path, tie: bool, tokenizer: Tokenizer) -> None:
    model = tiny(tie=tie)
    save(model, tokenizer, tmp_path / "model")
    again, other = load(tmp_path / "model")
    assert_equal(model, again)
    assert other.encode("Hello") == tokenizer.encode("Hello")
    assert other.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("name", ["tiny-tied", "tiny-llama3"])
def test_re_export_of_an_import_is_equal(tmp_path: Path, name: str) -> None:
    model, tokenizer = load(GOLDEN / name, dtype=None)
    save(model, tokenizer, tmp_path / "model", max_shard_bytes=30_000)
    (config, before), (saved, after) = (
        read_checkpoint(path) for path in (GOLDEN / name, tmp_path / "model")
    )
    assert set(before) == set(after)
    for key in before:
        assert before[key].dtype == after[key].dtype
        np.testing.assert_array_equal(before[key], after[key])
    # The names by which transformers knows the model say the same.
    same = set(saved) & set(config) - {"transformers_version"}
    assert {key: saved[key] for key in same} == {key: config[key] for key in same}
    assert {"rope_parameters", "head_dim", "dtype", "eos_token_id"} <= same


def test_bfloat16_stays_or_becomes_float32() -> None:
    kept, cast = (load(GOLDEN / "tiny-tied", dtype=d).model for d in (None, jnp.float32))
    assert kept.embed.dtype == jnp.bfloat16 and cast.embed.dtype == jnp.float32
    np.testing.assert_array_equal(kept.embed.astype(jnp.float32), cast.embed)


def test_projections_are_transposed_and_stacked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Hidden 4, two heads of width 4: q on disk is [8, 4], ours [4, 8]."""
    model = random_decoder(Config(288, 4, 6, 3, 2, 1, 4, tie_embeddings=False))
    save(model, tokenizer, tmp_path / "model")
    _, tensors = read_checkpoint(tmp_path / "model")
    ours = np.asarray(model.layers.attention.q)
    assert ours.shape == (3, 4, 8)
    for layer in range(3):
        q = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert q.shape == (8, 4)
        np.testing.assert_array_equal(q, ours[layer].T)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (4, 4)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (4, 6)
    assert tensors["lm_head.weight"].shape == (288, 4)


def test_tied_embeddings_are_one_tensor(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save(tiny(tie=True), tokenizer, tmp_path / "model")
    _, tensors = read_checkpoint(tmp_path / "model")
    assert [name for name in tensors if tensors[name].shape == (288, 4)] == [
        "model.embed_tokens.weight"
    ]
    # A file that repeats the embeddings as the head means the same; another head does not.
    rewrite(tmp_path / "model", {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert load(tmp_path / "model").model.head is None
    rewrite(tmp_path / "model", {"lm_head.weight": np.ones((288, 4), np.float32)})
    with pytest.raises(ValueError, match="unexpected lm_head.weight"):
        load(tmp_path / "model")


def test_an_untied_model_needs_its_head(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save(tiny(tie=False), tokenizer, tmp_path / "model")
    rewrite(tmp_path / "model", {"lm_head.weight": None})
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        load(tmp_path / "model")


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save(tiny(tie=True), tokenizer, tmp_path / "model")
    norm = "model.layers.1.input_layernorm.weight"
    extra = "model.layers.2.self_attn.q_norm.weight"
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"  # old checkpoints hold it: no matter
    ones = np.ones(3, np.float32)
    rewrite(tmp_path / "model", {norm: None, extra: ones, buffer: ones})
    with pytest.raises(ValueError, match=f"got 2 that differ: missing {norm}; unexpected {extra}"):
        load(tmp_path / "model")
    rewrite(tmp_path / "model", {norm: ones, extra: None})
    with pytest.raises(ValueError, match=rf"{norm} of shape \(3,\), not \(4,\)"):
        load(tmp_path / "model")
    rewrite(tmp_path / "model", {norm: np.ones(4, ml_dtypes.bfloat16)})
    with pytest.raises(ValueError, match=f"{norm} of dtype bfloat16, not float32"):
        load(tmp_path / "model")


def test_a_long_list_is_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save(tiny(tie=True, layers=12), tokenizer, tmp_path / "model")
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(12)]
    rewrite(tmp_path / "model", dict.fromkeys(names))
    with pytest.raises(ValueError, match="got 12 that differ: .* and 4 more"):
        load(tmp_path / "model")


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_configurations_that_are_not_supported(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("expected model_type llama, .*, got 'mamba'", {"model_type": "mamba"}),
        ("longrope", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 9.0}}),
        ("attention_bias", {"attention_bias": True}),
        ("at most 200 ids", {"vocab_size": 200}),
    ]
    for i, (message, values) in enumerate(cases):
        shutil.copytree(GOLDEN / "tiny-tied", tmp_path / str(i))
        edit_config(tmp_path / str(i), **values)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / str(i))


def test_nothing_is_overwritten(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save(tiny(tie=True), tokenizer, tmp_path / "model")
    with pytest.raises(ValueError, match="expected nothing at"):
        save(tiny(tie=True), tokenizer, tmp_path / "model")


def test_adapters_are_merged_or_written_beside(tmp_path: Path, tokenizer: Tokenizer) -> None:
    base = tiny(tie=True)
    adapted = add_lora(base, rank=2, key=jr.key(1))
    adapted = map_named(lambda name, x: x + 1 if name.endswith(".b") else x, adapted)
    save(adapted, tokenizer, tmp_path / "merged")
    assert_equal(load(tmp_path / "merged").model, merge(adapted))
    save(adapted, tokenizer, tmp_path / "apart", merged=False)
    plain = load(tmp_path / "apart").model
    assert_equal(plain, base)
    assert not has_adapters(plain)
    names = sorted(path.name for path in (tmp_path / "apart" / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]


def test_several_end_ids_survive(tmp_path: Path, tokenizer: Tokenizer) -> None:
    several = replace(tokenizer, eos_ids=(2, 0))
    save(tiny(tie=True), several, tmp_path / "model")
    found = load(tmp_path / "model").tokenizer
    assert (found.bos_id, found.eos_ids, found.pad_id) == (1, (2, 0), 0)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="expected a directory or a .gguf file"):
        load(tmp_path / "model.bin")
