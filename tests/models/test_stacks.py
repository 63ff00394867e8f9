"""Models whose layers are several stacks: Qwen3 MoE with dense layers, Gemma 4."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Config, gemma4, init_decoder, qwen3_moe
from purepost.models.hub import load, load_adapter, save_adapter
from purepost.models.hub.convert import decoder_from_tensors
from purepost.models.hub.families import names_of
from purepost.models.hub.safetensors import read_checkpoint
from purepost.models.neftune import Neftune
from purepost.models.trace import trace
from purepost.tree import named_leaves
from purepost.types import causal_rows
from purepost.weights import add_lora
from tests.compare import assert_same_bits

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = Config(*(19, 12, 16, 6, 2, 2, 4), max_positions=64)


def hf(name: str, **more: Any) -> dict[str, Any]:
    """The golden config.json of a family, with some fields otherwise; None: without it."""
    text = (GOLDEN / name / "config.json").read_text(encoding="utf-8")
    fields = {**json.loads(text), **more}
    return {k: v for k, v in fields.items() if v is not None}


def test_runs_are_layers_of_one_kind() -> None:
    assert CONFIG.runs == (range(0, 6),)
    windowed = replace(CONFIG, windows=(4, 4, None, 4, 4, None))
    assert windowed.runs == (range(0, 6),)  # of one shape
    wide = replace(windowed, full_head_dim=8, shared_kv_layers=2)
    assert wide.runs == (range(0, 2), range(2, 3), range(3, 4), range(4, 5), range(5, 6))
    assert [kind.source for kind in wide.kinds] == [None, None, None, None, 3, 2]
    assert [kind.head_dim for kind in wide.kinds] == [4, 4, 8, 4, 4, 8]
    experts = replace(CONFIG, num_experts=3, experts_per_token=1, dense_layers=(1, 2))
    assert experts.runs == (range(0, 1), range(1, 3), range(3, 6))
    with pytest.raises(ValueError, match="expected dense layers from 0 to 5"):
        replace(CONFIG, dense_layers=(6,))
    for shared in (6, 5, -1):
        with pytest.raises(ValueError, match="expected a layer of the same kind"):
            replace(windowed, shared_kv_layers=shared)


def test_leaves_are_named_by_their_first_layer() -> None:
    config = load(GOLDEN / "qwen3_moe_dense").model.config
    names = {
        name for name, _ in named_leaves(eqx.filter_eval_shape(init_decoder, jr.key(0), config))
    }
    assert {"layers.0.mlp.gate", "layers.1.mlp.router", "layers.1.mlp.gate"} <= names
    assert "layers.0.mlp.router" not in names and names <= set(names_of(config))
    assert names_of(config)["layers.0.mlp.gate"][0] == "model.layers.{}.mlp.gate_proj.weight"


def test_dense_layers_by_list_and_by_step() -> None:
    fields = {"num_hidden_layers": 6, "intermediate_size": 40}
    read = lambda **more: qwen3_moe.config_from_hf(hf("qwen3_moe", **fields, **more))  # noqa: E731
    assert read().dense_layers == () and read().dense_intermediate_size == 0
    config = read(decoder_sparse_step=2, mlp_only_layers=[1])
    assert config.dense_layers == (0, 1, 2, 4) and config.dense_intermediate_size == 40
    assert config.intermediate_size == 16
    assert qwen3_moe.config_from_hf(qwen3_moe.config_to_hf(config)) == config
    for wrong in ({"decoder_sparse_step": 7}, {"mlp_only_layers": list(range(6))}):
        with pytest.raises(ValueError, match="expected experts in some layer"):
            read(**wrong)
    with pytest.raises(ValueError, match="expected numbers of layers as mlp_only_layers"):
        read(mlp_only_layers=["a"])


def test_gemma4_says_its_wide_heads_in_two_ways() -> None:
    """By global fields, as on the hub, and layer by layer, as transformers saves them."""
    written = gemma4.config_from_hf(hf("gemma4_text"))
    ours = gemma4.config_to_hf(written)
    assert "per_layer_config" not in ours and ours["global_head_dim"] == 16
    assert gemma4.config_from_hf(ours) == written
    assert (written.full_head_dim, written.full_kv_heads) == (16, 1)
    plain = gemma4.config_from_hf({**ours, "attention_k_eq_v": False})
    assert plain.full_kv_heads is None and not plain.full_keys_as_values
    bare = {k: v for k, v in ours.items() if k not in ("rope_parameters", "layer_types")}
    config = gemma4.config_from_hf({**bare, "num_kv_shared_layers": 0})
    assert config.rope_scaling is not None and config.rope_scaling.rotated == 0.25
    assert (config.rope_theta, config.window_rope_theta) == (1e6, 1e4)
    assert config.windows == (12, 12, 12, 12, 12, None, None)  # the last one always sees all


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("expected num_experts in config.json to be a whole", {"enable_moe_block": True}),
        ("use_bidirectional_attention", {"use_bidirectional_attention": "all"}),
        ("expected a layer of the same kind", {"num_kv_shared_layers": 7}),
        ("expected per_layer_config to say", {"per_layer_config": {"0": {"head_dim": 4}}}),
        ("expected per_layer_config to say", {"per_layer_config": {"9": {"head_dim": 4}}}),
        ("expected per_layer_config to say", {"per_layer_config": {"2": {"hidden_size": 4}}}),
    ],
)
def test_what_gemma4_does_not_have_is_an_error(message: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        gemma4.config_from_hf(hf("gemma4_text", **fields))


def test_keys_that_no_layer_reads_are_left_out() -> None:
    """The hub's Gemma 4 has keys and values of the layers that share others', too."""
    config, found = read_checkpoint(GOLDEN / "gemma4_text")
    tensors = {name: found[name] for name in found}
    unused = tensors | {
        f"model.layers.{i}.self_attn.{which}.weight": np.ones(3, np.float32)
        for i in (4, 6)
        for which in ("k_proj", "v_proj", "k_norm")
    }
    ours = gemma4.config_from_hf(config)
    assert_same_bits(
        *(decoder_from_tensors(ours, t, names_of(ours), None) for t in (tensors, unused))
    )
    more = tensors | {"model.layers.0.self_attn.k_extra.weight": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match="unexpected model.layers.0.self_attn.k_extra"):
        decoder_from_tensors(ours, more, names_of(ours), None)


def test_adapters_of_several_stacks(tmp_path: Path) -> None:
    """Out in PEFT's layout and in again; ranks must be alike, for its patterns name modules."""
    model = load(GOLDEN / "gemma4_text").model
    adapted = add_lora(model, rank=2, key=jr.key(0))
    names = {name.removesuffix(".a") for name, _ in named_leaves(adapted) if name.endswith(".a")}
    assert {"layers.0.attention.v", "layers.2.attention.k", "layers.5.mlp.down"} <= names
    assert not {"layers.2.attention.v", "layers.4.attention.k"} & names
    noisy = jax.tree.map(lambda x: x + 0.5, adapted)
    save_adapter(noisy, tmp_path / "adapter", base="gemma4")
    found = load_adapter(model, tmp_path / "adapter")
    for (name, x), (_, y) in zip(named_leaves(noisy), named_leaves(found), strict=True):
        if name.endswith((".a", ".b")):
            np.testing.assert_array_equal(x, y)
    uneven = add_lora(model, rank=2, ranks={r"layers\.2\..*q$": 1}, key=jr.key(0))
    with pytest.raises(ValueError, match="expected one rank and alpha of every q_proj"):
        save_adapter(uneven, tmp_path / "uneven", base="gemma4")


def test_adapters_that_peft_would_confuse_are_refused(tmp_path: Path) -> None:
    model = load(GOLDEN / "qwen3_moe_dense").model
    with pytest.raises(ValueError, match="expected adapters of attention only where some layers"):
        save_adapter(add_lora(model, rank=1, key=jr.key(0)), tmp_path / "a", base="qwen3")
    attention = add_lora(model, where=r"attention\.[qkvo]$", rank=1, key=jr.key(0))
    save_adapter(attention, tmp_path / "b", base="qwen3")
    assert_same_bits(load_adapter(model, tmp_path / "b"), attention)


def test_experts_beside_an_mlp_take_adapters_that_peft_has_not(tmp_path: Path) -> None:
    model = load(GOLDEN / "gemma4_text_experts").model
    adapted = add_lora(model, rank=1, key=jr.key(0))
    shapes = {name: x.shape for name, x in named_leaves(adapted) if name.endswith(".a")}
    assert shapes["layers.1.experts.mlp.up.a"] == (2, 6, 24, 1)
    assert shapes["layers.0.mlp.up.a"] == (1, 24, 1)
    with pytest.raises(ValueError, match="expected no adapters of experts beside an MLP"):
        save_adapter(adapted, tmp_path / "a", base="gemma4")
    dense = add_lora(model, where=r"\.\d\.(attention\.[qkvo]|mlp\.\w+)$", rank=1, key=jr.key(0))
    save_adapter(dense, tmp_path / "b", base="gemma4")
    assert_same_bits(load_adapter(model, tmp_path / "b"), dense)


def test_what_works_on_one_stack_says_so() -> None:
    model = load(GOLDEN / "gemma4_text").model
    rows = causal_rows(jnp.ones((1, 4), jnp.int32), jnp.full(1, 4, jnp.int32))
    with pytest.raises(ValueError, match="expected a model whose layers are all of one kind"):
        trace(model, rows)


def test_noisy_embeddings_leave_what_layers_are_told() -> None:
    """Next to no noise changes next to nothing."""
    model = load(GOLDEN / "gemma4_text").model
    tokens = jnp.asarray([[5, 9, 9, 7], [1, 2, 0, 0]], jnp.int32)
    rows = causal_rows(tokens, jnp.asarray([4, 2], jnp.int32))
    run = eqx.filter_jit(lambda m: m(rows, key=jr.key(0))[0])
    np.testing.assert_allclose(run(Neftune(model, 1e-7)), run(model), rtol=1e-4, atol=1e-4)
