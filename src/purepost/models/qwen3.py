"""The dense Qwen3 family: Llama's layers with norms on each head's queries and keys."""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import Json, check_fields, shared_config, shared_to_hf
from .names import DENSE, QK_NORM
from .qwen2 import WINDOW_FIELDS, read_windows, windows_to_hf

NAMES = {**DENSE, **QK_NORM}

_NEUTRAL = {"hidden_act": ("silu",)}

QWEN3_0_6B = Config(
    *(151936, 1024, 3072, 28, 16, 8, 128),
    norm_eps=1e-6,
    rope_theta=1000000.0,
    max_positions=40960,
    family="qwen3",
    qk_norm=True,
)
QWEN3_1_7B = replace(QWEN3_0_6B, hidden_size=2048, intermediate_size=6144)
QWEN3_4B = replace(
    QWEN3_0_6B, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32
)
QWEN3_8B = replace(QWEN3_4B, hidden_size=4096, intermediate_size=12288, tie_embeddings=False)


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=WINDOW_FIELDS, neutral=_NEUTRAL)
    shared = replace(shared_config(config, head_dim=128), family="qwen3", qk_norm=True)
    return replace(shared, windows=read_windows(config, shared.num_layers))


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    same = {"hidden_act": "silu", "attention_bias": False, **windows_to_hf(config)}
    return {**shared_to_hf(config, "Qwen3ForCausalLM"), **same}
