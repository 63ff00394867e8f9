"""config.json read and written: what is known, what is neutral, what is an error."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.models import (
    Config,
    RopeScaling,
    gemma,
    gemma2,
    gemma3,
    init_decoder,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from purepost.models.fields import COSMETIC
from purepost.models.hub.documents import parse_config
from purepost.models.hub.families import FAMILIES, family_of, model_table

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]
EVERY = pytest.mark.parametrize("name", list(FAMILIES))


def stored(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))


def read(name: str, **values: Any) -> Config:
    return FAMILIES[name].config_from_hf({**stored(name), **values})


# Parameters as the models' authors count them (embeddings once where they are tied).
PRESETS: dict[str, tuple[Config, int]] = {
    "SmolLM2-135M": (llama.SMOLLM2_135M, 134_515_008),
    "SmolLM2-360M": (llama.SMOLLM2_360M, 361_821_120),
    "SmolLM2-1.7B": (llama.SMOLLM2_1_7B, 1_711_376_384),
    "Llama-3-8B": (llama.LLAMA3_8B, 8_030_261_248),
    "Llama-3.1-8B": (llama.LLAMA3_1_8B, 8_030_261_248),
    "Llama-3.2-1B": (llama.LLAMA3_2_1B, 1_235_814_400),
    "Llama-3.2-3B": (llama.LLAMA3_2_3B, 3_212_749_824),
    "Mistral-7B-v0.1": (mistral.MISTRAL_7B_V0_1, 7_241_732_096),
    "Mistral-7B-v0.3": (mistral.MISTRAL_7B_V0_3, 7_248_023_552),
    "Qwen2.5-0.5B": (qwen2.QWEN2_5_0_5B, 494_032_768),
    "Qwen2.5-1.5B": (qwen2.QWEN2_5_1_5B, 1_543_714_304),
    "Qwen2.5-3B": (qwen2.QWEN2_5_3B, 3_085_938_688),
    "Qwen2.5-7B": (qwen2.QWEN2_5_7B, 7_615_616_512),
    "Qwen3-0.6B": (qwen3.QWEN3_0_6B, 596_049_920),
    "Qwen3-1.7B": (qwen3.QWEN3_1_7B, 1_720_574_976),
    "Qwen3-4B": (qwen3.QWEN3_4B, 4_022_468_096),
    "Qwen3-8B": (qwen3.QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": (qwen3_moe.QWEN3_30B_A3B, 30_532_122_624),
    "Gemma-2B": (gemma.GEMMA_2B, 2_506_172_416),
    "Gemma-7B": (gemma.GEMMA_7B, 8_537_680_896),
    "Gemma-2-2B": (gemma2.GEMMA2_2B, 2_614_341_888),
    "Gemma-2-9B": (gemma2.GEMMA2_9B, 9_241_705_984),
    "Gemma-2-27B": (gemma2.GEMMA2_27B, 27_227_128_320),
    "Gemma-3-270M": (gemma3.GEMMA3_270M, 268_098_176),
    "Gemma-3-1B": (gemma3.GEMMA3_1B, 999_885_952),
}


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    config, count = PRESETS[name]
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count
    family = family_of(config.family)
    assert family.config_from_hf(family.config_to_hf(config)) == config


@EVERY
def test_a_field_that_would_change_the_maths_is_an_error(name: str) -> None:
    assert read(name, use_cache=False, dtype="bfloat16", attention_dropout=0.0) == read(name)
    assert read(name, _attn_implementation_autoset=True, initializer_range=0.5) == read(name)
    wrong: dict[str, Any] = {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "hidden_act": "relu",
        "partial_rotary_factor": 0.5,
        "use_bidirectional_attention": True,
        "quantization_config": {"bits": 4},
        "attention_multiplier": 0.5,  # of other families: unknown here
    }
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=f"(expected|got) {field} = "):
            read(name, **{field: value})


@EVERY
def test_missing_and_malformed_fields_are_errors(name: str) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("hidden_size", None, "hidden_size in config.json to be a whole number from 1"),
        ("vocab_size", "288", "vocab_size in config.json to be a whole number"),
        ("num_hidden_layers", 10**9, "num_hidden_layers in config.json to be .* to 4096"),
        ("num_attention_heads", 0, "num_attention_heads in config.json"),
        ("num_key_value_heads", 3, "num_kv_heads to divide num_heads 4"),
        ("rms_norm_eps", None, "rms_norm_eps in config.json to be a number above 0"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings in config.json to be true or false"),
        ("rope_parameters", [1], "rope_parameters in config.json to be an object"),
        ("head_dim", 7, "an even head_dim"),
    ]
    for field, value, message in cases:
        with pytest.raises(ValueError, match=message):
            read(name, **{field: value})


def test_what_only_some_families_have() -> None:
    for name in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        with pytest.raises(ValueError, match="expected layer_types of"):
            read(name, layer_types=["full_attention"])
        with pytest.raises(ValueError, match="got 'chunked_attention'"):
            layers = read(name).num_layers
            read(name, layer_types=["chunked_attention"] * layers)
    with pytest.raises(ValueError, match="at most 6 experts per token"):
        read("qwen3_moe", num_experts_per_tok=7)
    with pytest.raises(ValueError, match="expected attn_logit_softcapping = None of a gemma3_text"):
        read("gemma3_text", attn_logit_softcapping=50.0)
    with pytest.raises(ValueError, match="unexpected|full_attention and sliding_attention"):
        read("gemma3_text", rope_parameters={"rope_type": "default"})
    with pytest.raises(
        ValueError, match=r"expected windows of one size in a mistral, got \[4, 8\]"
    ):
        windowed = replace(read("mistral"), windows=(4, 8))
        FAMILIES["mistral"].config_to_hf(windowed)


def without(name: str, *fields: str) -> dict[str, Any]:
    return {k: v for k, v in stored(name).items() if k not in fields}


def test_older_spellings() -> None:
    """As the hub's first files of each family have them."""
    plain = without("llama", "rope_parameters", "rope_scaling", "rope_theta", "head_dim")
    old = llama.config_from_hf({**plain, "rope_theta": 500000.0, "head_dim": None})
    assert (old.rope_theta, old.rope_scaling, old.head_dim) == (500000.0, None, 6)
    assert llama.config_from_hf(plain).rope_theta == 10000.0
    yarn = {"type": "yarn", "factor": 4.0}
    stretched = qwen2.config_from_hf(
        {**without("qwen2", "rope_parameters", "layer_types"), "rope_scaling": yarn}
    )
    assert stretched.windows == (None, 12)
    scaling = stretched.rope_scaling
    assert scaling is not None and scaling.original_max_positions == 256
    assert scaling.attention_factor == pytest.approx(1.138629436, rel=1e-9)  # .1 ln 4 + 1
    assert read("qwen2", use_sliding_window=False, layer_types=None).windows == ()
    assert read("mistral", sliding_window=None).windows == ()
    assert read("gemma", hidden_act="gelu", hidden_activation=None) == read("gemma")
    third = {**without("gemma3_text", "rope_parameters", "layer_types"), "rope_theta": 1e6}
    third |= {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 2}
    third["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    config = gemma3.config_from_hf(third)
    assert (config.rope_theta, config.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert (config.window_rope_theta, config.window_rope_scaling) == (10000.0, None)
    assert config.windows == (12, None, 12, None)


def test_dynamic_stretching_exports_the_trained_positions() -> None:
    longer = replace(read("qwen3"), max_positions=1024)
    assert FAMILIES["qwen3"].config_to_hf(longer)["max_position_embeddings"] == 256


def test_an_unknown_family_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="llama, mistral, .*, got 'mamba'"):
        family_of("mamba")


def test_models_of_more_than_text_are_refused() -> None:
    """But for those in hub/multimodal.py, whose text models are read."""
    several = {"model_type": "llava", "text_config": stored("llama"), "vision_config": {}}
    with pytest.raises(ValueError, match="of text alone, or gemma3, .*, got .llava., which reads"):
        parse_config(several)


def test_the_table_has_a_row_for_each_family() -> None:
    """README shows it as it is."""
    rows = model_table().splitlines()
    assert len(rows) == 2 + len(FAMILIES)
    assert all(f"`{name}`" in row for name, row in zip(FAMILIES, rows[2:], strict=True))
    assert model_table() in (ROOT / "README.md").read_text(encoding="utf-8")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(st.sampled_from(list(FAMILIES)), st.data())
def test_any_value_of_any_field_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """Never another exception than ValueError."""
    fields = stored(name)
    field = data.draw(st.sampled_from(sorted(set(fields) - COSMETIC) + ["rope_scaling"]))
    value = data.draw(JSON)
    if isinstance(fields.get(field), Mapping) and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from([*fields[field], "rope_type", "type", "rope_theta"]))
        value = {**fields[field], inner: value}
    try:
        config = FAMILIES[name].config_from_hf({**fields, field: value})
    except ValueError:
        return
    assert config.num_layers <= 4096
