"""The first Gemma family: a gated GELU, norms that store their scale's distance from 1, and
embeddings multiplied by √d.

Source: Gemma Team, Gemma, 2403.08295, §2.
"""

import math
from dataclasses import replace
from typing import Any

from .config import Config
from .fields import Json, check_fields, shared_config, shared_to_hf
from .layers import gelu
from .names import DENSE

NAMES = DENSE

GELU = ("gelu_pytorch_tanh", None)
# The first files say "gelu" in hidden_act and mean its tanh approximation.
_NEUTRAL = {"hidden_act": ("gelu_pytorch_tanh", "gelu", None), "hidden_activation": GELU}


def as_gemma(config: Config, family: str) -> Config:
    """The Config with what all Gemmas have."""
    scale = math.sqrt(config.hidden_size)
    return replace(config, family=family, activation=gelu, norm_offset=1.0, embed_scale=scale)


GEMMA_2B = as_gemma(Config(256000, 2048, 16384, 18, 8, 1, 256, norm_eps=1e-6), "gemma")
GEMMA_7B = as_gemma(Config(256000, 3072, 24576, 28, 16, 16, 256, norm_eps=1e-6), "gemma")


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=(), neutral=_NEUTRAL)
    return as_gemma(shared_config(config, head_dim=256, tied=True), "gemma")


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    same = {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
    return {**shared_to_hf(config, "GemmaForCausalLM"), **same}
