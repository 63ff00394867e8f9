"""The Gemma 2 family: every second layer sees a window, soft-caps on scores and logits, norms
before and after attention and MLP.

Source: Gemma Team, Gemma 2, 2408.00118, §2.
"""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import (
    Json,
    check_fields,
    layer_types,
    number,
    optional_number,
    shared_config,
    shared_to_hf,
    window_of,
    windows_of,
)
from .gemma import GELU, as_gemma
from .names import DENSE, POST_NORMS

NAMES = {**DENSE, **POST_NORMS}

_READS = (
    *("query_pre_attn_scalar", "sliding_window", "sliding_window_size", "layer_types"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_NEUTRAL = {"hidden_act": GELU, "hidden_activation": GELU}


def _preset(config: Config, query_scalar: int) -> Config:
    return replace(
        as_gemma(config, "gemma2"),
        norm_eps=1e-6,
        post_norms=True,
        query_scale=query_scalar**-0.5,
        attention_softcap=50.0,
        final_softcap=30.0,
        windows=(4096, None) * (config.num_layers // 2),
    )


GEMMA2_2B = _preset(Config(256000, 2304, 9216, 26, 8, 4, 256), 256)
GEMMA2_9B = _preset(Config(256000, 3584, 14336, 42, 16, 8, 256), 256)
GEMMA2_27B = _preset(Config(256000, 4608, 36864, 46, 32, 16, 128), 144)


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=_READS, neutral=_NEUTRAL)
    shared = as_gemma(shared_config(config, head_dim=256, tied=True), "gemma2")
    types = ["sliding_attention", "full_attention"] * (shared.num_layers // 2 + 1)
    windowed = {"sliding_window": 4096, **config}
    return replace(
        shared,
        post_norms=True,
        query_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=optional_number(config, "attn_logit_softcapping", 50.0),
        final_softcap=optional_number(config, "final_logit_softcapping", 30.0),
        windows=windows_of(windowed, shared.num_layers, types[: shared.num_layers]),
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    return {**shared_to_hf(config, "Gemma2ForCausalLM"), **gemma2_fields(config)}


def gemma2_fields(config: Config) -> dict[str, Any]:
    """What Gemma 2 and 3 say beside the shared fields."""
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    scalar = scale**-2
    whole = round(scalar)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": whole if abs(whole - scalar) < 1e-6 * scalar else scalar,
        "sliding_window": window_of(config),
        "layer_types": layer_types(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
