"""The Llama family: Llama 2, 3, 3.1, 3.2, SmolLM2 and everything else that says
`LlamaForCausalLM`.
"""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import Json, check_fields, shared_config, shared_to_hf
from .names import DENSE
from .rope import RopeScaling

NAMES = DENSE

SMOLLM2_135M = Config(49152, 576, 1536, 30, 9, 3, 64, rope_theta=100000.0)
SMOLLM2_360M = Config(49152, 960, 2560, 32, 15, 5, 64, rope_theta=100000.0)
SMOLLM2_1_7B = Config(49152, 2048, 8192, 24, 32, 32, 64, rope_theta=130000.0)

LLAMA3_8B = Config(128256, 4096, 14336, 32, 32, 8, 128, rope_theta=500000.0, tie_embeddings=False)
LLAMA3_1_8B = replace(
    LLAMA3_8B, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), max_positions=131072
)
LLAMA3_2_1B = replace(
    LLAMA3_1_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    tie_embeddings=True,
)
LLAMA3_2_3B = replace(LLAMA3_2_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128)

_NEUTRAL = {"hidden_act": ("silu",)}


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=(), neutral=_NEUTRAL)
    return shared_config(config)


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    same = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    return {**shared_to_hf(config, "LlamaForCausalLM"), **same}
