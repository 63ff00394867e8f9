"""The Mistral family: Llama's layers, whose queries see a window of tokens in the first models."""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import Json, check_fields, integer, shared_config, shared_to_hf, window_of
from .names import DENSE

NAMES = DENSE

MISTRAL_7B_V0_1 = Config(
    *(32000, 4096, 14336, 32, 32, 8, 128),
    tie_embeddings=False,
    max_positions=32768,
    family="mistral",
    windows=(4096,) * 32,
)
MISTRAL_7B_V0_3 = replace(MISTRAL_7B_V0_1, vocab_size=32768, rope_theta=1000000.0, windows=())

_NEUTRAL = {"hidden_act": ("silu",)}


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=("sliding_window",), neutral=_NEUTRAL)
    shared = replace(shared_config(config), family="mistral")
    if config.get("sliding_window", 4096) is None:
        return shared
    return replace(shared, windows=(integer(config, "sliding_window", 4096),) * shared.num_layers)


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    same = {"hidden_act": "silu", "sliding_window": window_of(config)}
    return {**shared_to_hf(config, "MistralForCausalLM"), **same}
