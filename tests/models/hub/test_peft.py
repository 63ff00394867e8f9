"""Adapters in and out: PEFT's own files give PEFT's logits; scales and keys (case 19)."""

import json
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Config, Decoder, init_decoder
from purepost.models.hub import load, load_adapter, save_adapter
from purepost.models.hub.safetensors import read_file, save_tensors
from purepost.tree import map_named, named_leaves
from purepost.types import causal_rows
from purepost.weights import add_lora, lora_scale, merge

GOLDEN = Path(__file__).parents[2] / "golden"
STEM = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def base() -> Decoder:
    return load(GOLDEN / "tiny-llama3").model


def adapted(base: Decoder, **options: Any) -> Decoder:
    """The model with adapters whose B is 0.5."""
    model = add_lora(base, key=jr.key(0), **options)
    return map_named(lambda name, x: x + 0.5 if name.endswith(".b") else x, model)


def scale_of(model: Decoder, name: str) -> float:
    """s of a weight, from the difference that its adapter makes."""
    merged = dict(named_leaves(merge(model)))[f"layers.{name}"]
    leaves = dict(named_leaves(model))
    a, b = (leaves[f"layers.{name}.{half}"] for half in "ab")
    added = merged - leaves[f"layers.{name}.base"]
    return float(jnp.vdot(added, a @ b) / jnp.vdot(a @ b, a @ b))


def copied(source: Path, target: Path, **config: Any) -> Path:
    """A copy of an adapter's directory with other settings."""
    shutil.copytree(source, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def rewrite(directory: Path, edit: dict[str, np.ndarray | None]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = read_file(path)
    changed = {**{name: tensors[name] for name in tensors}, **edit}
    save_tensors(path, {name: value for name, value in changed.items() if value is not None})


def test_an_adapter_of_peft_gives_its_logits(base: Decoder) -> None:
    golden = np.load(GOLDEN / "adapter.npz")
    model = load_adapter(base, GOLDEN / "adapter")
    rows = causal_rows(jnp.asarray(golden["ids"][None]), jnp.array([40], jnp.int32))
    got = np.asarray(model.unembed(model(rows)[0]))[0]
    np.testing.assert_allclose(got, golden["logits"], rtol=0, atol=1e-4)
    plain = np.asarray(base.unembed(base(rows)[0]))[0]
    assert np.abs(plain - golden["logits"]).max() > 0.1


def test_scales_follow_the_patterns(base: Decoder, tmp_path: Path) -> None:
    """r 4, α 8, rank 2 for v, α 3 for down: α/√r as PEFT wrote it, α/r where it says so."""
    stabilized = load_adapter(base, GOLDEN / "adapter")
    plain = load_adapter(base, copied(GOLDEN / "adapter", tmp_path / "a", use_rslora=False))
    expected = {
        "attention.q": (4.0, 2.0),
        "attention.v": (8 / 2**0.5, 4.0),
        "mlp.down": (1.5, 0.75),
    }
    for name, (rs, usual) in expected.items():
        assert scale_of(stabilized, name) == pytest.approx(rs, rel=1e-4)
        assert scale_of(plain, name) == pytest.approx(usual, rel=1e-4)


@pytest.mark.parametrize("stabilized", [False, True])
def test_rank_16_of_one_module(base: Decoder, tmp_path: Path, stabilized: bool) -> None:
    model = adapted(base, rank=4, alpha=8.0, ranks={r"\.q$": 16}, rank_stabilized=stabilized)
    assert lora_scale(4, 8.0) == 2.0 and lora_scale(4, 8.0, rank_stabilized=True) == 4.0
    save_adapter(model, tmp_path / "adapter", base="owner/name")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"q_proj": 16} and config["r"] == 4
    # α/√r is written as the α whose α/r is the same.
    assert config["lora_alpha"] == (16 if stabilized else 8)
    assert config["alpha_pattern"] == ({"q_proj": 32} if stabilized else {})
    again = load_adapter(base, tmp_path / "adapter")
    for loaded in (model, again):
        assert scale_of(loaded, "attention.q") == pytest.approx(
            2.0 if stabilized else 0.5, rel=1e-4
        )
        assert scale_of(loaded, "mlp.up") == pytest.approx(4.0 if stabilized else 2.0, rel=1e-4)


def test_saved_and_loaded_is_the_same(base: Decoder, tmp_path: Path) -> None:
    model = adapted(base, rank=3, alpha=6.0, where=r"attention\.[qv]$", dropout=0.05)
    save_adapter(model, tmp_path / "adapter", base="owner/name")
    again = load_adapter(base, tmp_path / "adapter")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == "owner/name"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6, 0.05)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    tensors = read_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 8  # 2 layers, 2 weights, A and B
    q = f"{STEM}.1.self_attn.q_proj"
    leaves = dict(named_leaves(model))
    np.testing.assert_array_equal(
        tensors[f"{q}.lora_A.weight"], np.asarray(leaves["layers.attention.q.a"])[1].T
    )
    assert tensors[f"{q}.lora_A.weight"].shape == (3, 32)
    assert tensors[f"{q}.lora_B.weight"].shape == (64, 3)


FAMILY: dict[str, Any] = {
    "mistral": {"windows": (5, 5)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": False},
    "qwen3_moe": {"qk_norm": True, "num_experts": 3, "experts_per_token": 2},
    "gemma": {"norm_offset": 1.0},
    "gemma2": {"norm_offset": 1.0, "post_norms": True},
    "gemma3_text": {"norm_offset": 1.0, "post_norms": True, "qk_norm": True},
}


def random_decoder(family: str) -> Decoder:
    config = Config(30, 8, 12, 2, 2, 1, 4, family=family, **FAMILY[family])
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


@pytest.mark.parametrize("family", FAMILY)
def test_every_familys_names(tmp_path: Path, family: str) -> None:
    """All its matrices; ranks and scales that differ; the head, where there is one of its own."""
    base = random_decoder(family)
    where = r"layers\.(attention\.[qkvo]|mlp\.(router|gate|up|down))$|head$"
    ranks, alphas = {r"attention\.[kv]$": 1}, {r"attention\.o$": 5.0}
    model = adapted(base, rank=2, where=where, alpha=8.0, ranks=ranks, alphas=alphas)
    save_adapter(model, tmp_path / "a", base="owner/name")
    again = load_adapter(base, tmp_path / "a")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    mlp = [*(["gate"] if "moe" in family else []), "gate_proj", "up_proj", "down_proj"]
    head = ["lm_head"] if family == "qwen3" else []
    attention = [f"{x}_proj" for x in "qkvo"]
    assert config["target_modules"] == [*attention, *mlp, *head]
    assert config["rank_pattern"] == {"k_proj": 1, "v_proj": 1}
    assert config["alpha_pattern"] == {"o_proj": 5}
    tensors = read_file(tmp_path / "a" / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.") for name in tensors}
    assert "model.layers.1.self_attn.o_proj.lora_B.weight" in names
    assert not head or {f"lm_head.lora_{x}.weight" for x in "AB"} <= names


def test_every_expert_has_its_own(tmp_path: Path) -> None:
    base = random_decoder("qwen3_moe")
    model = adapted(base, rank=2, where=r"mlp\.up$")
    save_adapter(model, tmp_path / "a", base="owner/name")
    b = dict(named_leaves(model))["layers.mlp.up.b"]
    assert b.shape == (2, 3, 2, 12)
    tensors = read_file(tmp_path / "a" / "adapter_model.safetensors")
    name = f"{STEM}.1.mlp.experts.2.up_proj.lora_B.weight"
    np.testing.assert_array_equal(tensors[name], b[1, 2].T)
    rewrite(tmp_path / "a", {name: None})
    with pytest.raises(ValueError, match=r"layers.mlp.up.b lacks layers \[1\]"):
        load_adapter(base, tmp_path / "a")


def test_keys_that_do_not_fit_are_errors(base: Decoder, tmp_path: Path) -> None:
    ones = np.ones((4, 32), np.float32)
    q = f"{STEM}.0.self_attn.q_proj.lora_A.weight"
    half: dict[str, np.ndarray | None] = {
        f"{STEM}.{i}.mlp.up_proj.lora_A.weight": ones for i in (0, 1)
    }
    cases: list[tuple[str, dict[str, np.ndarray | None]]] = [
        ("unmatched key .*q_projection", {f"{STEM}.0.self_attn.q_projection.lora_A.weight": ones}),
        ("unmatched key .*lora_magnitude", {f"{STEM}.0.mlp.up_proj.lora_magnitude_vector": ones}),
        (r"unmatched key .*layers\.2", {f"{STEM}.2.self_attn.q_proj.lora_A.weight": ones}),
        (r"layers.attention.q.a lacks layers \[0\]", {q: None}),
        ("layers.attention.q.a has several shapes", {q: ones[:3]}),
        ("layers.mlp.up.a stands without its b", half),
    ]
    for i, (message, edit) in enumerate(cases):
        path = copied(GOLDEN / "adapter", tmp_path / str(i))
        rewrite(path, edit)
        with pytest.raises(ValueError, match=message):
            load_adapter(base, path)


def test_shapes_that_do_not_fit_are_errors(base: Decoder, tmp_path: Path) -> None:
    path = copied(GOLDEN / "adapter", tmp_path / "a")
    edit = {f"{STEM}.{i}.self_attn.q_proj.lora_A.weight": np.ones((4, 16)) for i in (0, 1)}
    rewrite(path, dict(edit))
    with pytest.raises(ValueError, match=r"layers.attention.q.a of shape \(2, 32, 4\), got"):
        load_adapter(base, path)
    other = copied(GOLDEN / "adapter", tmp_path / "b", rank_pattern={})
    with pytest.raises(ValueError, match="expected rank 4 of layers.attention.v, .* got 2"):
        load_adapter(base, other)


def test_what_is_not_supported_is_an_error(base: Decoder, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("peft_type = 'LORA' in adapter_config.json, got 'IA3'", {"peft_type": "IA3"}),
        ("layers.attention.q.[ab] stands without its magnitude", {"use_dora": True}),
        ("layer_replication = None", {"layer_replication": [[0, 2]]}),
        ("init_lora_weights = True in .*, got 'pissa'", {"init_lora_weights": "pissa"}),
        ("one rank and alpha in all layers", {"alpha_pattern": {"layers.0.self_attn.q_proj": 1}}),
    ]
    for i, (message, config) in enumerate(cases):
        path = copied(GOLDEN / "adapter", tmp_path / str(i), **config)
        with pytest.raises(ValueError, match=message):
            load_adapter(base, path)


def test_models_and_places_that_do_not_fit(base: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a model with adapters, got none"):
        save_adapter(base, tmp_path / "a", base="owner/name")
    with pytest.raises(ValueError, match="expected a model without adapters"):
        load_adapter(adapted(base, rank=2), GOLDEN / "adapter")
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        load_adapter(base, tmp_path)
    save_adapter(adapted(base, rank=2), tmp_path / "b", base="owner/name")
    with pytest.raises(ValueError, match="expected nothing at"):
        save_adapter(adapted(base, rank=2), tmp_path / "b", base="owner/name")
