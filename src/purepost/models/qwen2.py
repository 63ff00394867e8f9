"""The Qwen2 family: Qwen2, Qwen2.5 and the R1 distillations of that shape: Llama's layers with
biases on queries, keys and values.
"""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import (
    Json,
    check_fields,
    flag,
    integer,
    layer_types,
    shared_config,
    shared_to_hf,
    window_of,
    windows_of,
)
from .names import DENSE, QKV_BIAS

NAMES = {**DENSE, **QKV_BIAS}

# What Qwen2 and Qwen3 read of windows: none, unless use_sliding_window, and then the layers from
# max_window_layers on, or those that layer_types names.
WINDOW_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

_NEUTRAL = {"hidden_act": ("silu",), "use_mrope": (False, None)}

QWEN2_5_0_5B = Config(
    *(151936, 896, 4864, 24, 14, 2, 64),
    norm_eps=1e-6,
    rope_theta=1000000.0,
    max_positions=32768,
    family="qwen2",
    qkv_bias=True,
)
QWEN2_5_1_5B = replace(
    QWEN2_5_0_5B,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    head_dim=128,
)
QWEN2_5_3B = replace(
    QWEN2_5_1_5B, hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16
)
QWEN2_5_7B = replace(
    QWEN2_5_1_5B,
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    tie_embeddings=False,
)


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=WINDOW_FIELDS, neutral=_NEUTRAL)
    shared = replace(shared_config(config), family="qwen2", qkv_bias=True)
    return replace(shared, windows=read_windows(config, shared.num_layers))


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    same = {"hidden_act": "silu", **windows_to_hf(config)}
    return {**shared_to_hf(config, "Qwen2ForCausalLM"), **same}


def read_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """The windows of a Qwen2 or Qwen3."""
    first = num_layers
    if flag(config, "use_sliding_window", False):
        first = config.get("max_window_layers", 28)
        first = 0 if first == 0 else integer(config, "max_window_layers", 28)
    otherwise = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    return windows_of(config, num_layers, otherwise)


def windows_to_hf(config: Config) -> dict[str, Any]:
    """The fields that `read_windows` reads."""
    window = window_of(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_layers,
        "layer_types": layer_types(config),
    }
