"""The Gemma 3 text family: five layers with a window to one without, each kind with a RoPE of its
own, and norms on queries and keys in place of Gemma 2's soft-cap.

Source: Gemma Team, Gemma 3, 2503.19786, §2.
"""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import (
    Json,
    check_fields,
    integer,
    number,
    optional_number,
    rope_of,
    rope_to_hf,
    shared_config,
    shared_to_hf,
    table,
    windows_of,
)
from .gemma import GELU, as_gemma
from .gemma2 import gemma2_fields
from .names import DENSE, POST_NORMS, QK_NORM

NAMES = {**DENSE, **POST_NORMS, **QK_NORM}

PATTERN = 6  # every sixth layer sees all tokens

_READS = (
    *("query_pre_attn_scalar", "sliding_window", "layer_types", "sliding_window_pattern"),
    *("rope_local_base_freq", "final_logit_softcapping"),
)
_NEUTRAL = {
    "hidden_act": GELU,
    "hidden_activation": GELU,
    "attn_logit_softcapping": (None,),
}


def _preset(config: Config) -> Config:
    windows = tuple(512 if (i + 1) % PATTERN else None for i in range(config.num_layers))
    return replace(
        as_gemma(config, "gemma3_text"),
        norm_eps=1e-6,
        rope_theta=1000000.0,
        max_positions=32768,
        qk_norm=True,
        post_norms=True,
        query_scale=256**-0.5,
        windows=windows,
        window_rope_theta=10000.0,
    )


GEMMA3_270M = _preset(Config(262144, 640, 2048, 18, 4, 1, 256))
GEMMA3_1B = _preset(Config(262144, 1152, 6912, 26, 4, 1, 256))


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=_READS, neutral=_NEUTRAL)
    full, local = ropes(config)
    plain = {**config, "rope_parameters": full, "rope_scaling": None}
    shared = as_gemma(shared_config(plain, head_dim=256, tied=True, rope_theta=1e6), "gemma3_text")
    pattern = integer(config, "sliding_window_pattern", PATTERN)
    types = [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(shared.num_layers)
    ]
    local_theta = number(config, "rope_local_base_freq", 10000.0)
    theta, scaling = rope_of(local, local_theta, shared.max_positions)
    windowed = {"sliding_window": 4096, **config}
    return replace(
        shared,
        qk_norm=True,
        post_norms=True,
        query_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        final_softcap=optional_number(config, "final_logit_softcapping"),
        windows=windows_of(windowed, shared.num_layers, types),
        window_rope_theta=theta,
        window_rope_scaling=scaling,
    )


def ropes(config: Json) -> tuple[Json, Json]:
    """The RoPE parameters of the layers without a window, and of those with one."""
    parameters = table(config, "rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    unknown = sorted(set(parameters) - set(kinds))
    if unknown:
        raise ValueError(f"expected rope_parameters of {' and '.join(kinds)}, got {unknown}")
    full, local = (table(parameters, kind) for kind in kinds)
    return {**full, **table(config, "rope_scaling")}, local


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    shared = shared_to_hf(config, "Gemma3ForCausalLM")
    theta = 10000.0 if config.window_rope_theta is None else config.window_rope_theta
    local = rope_to_hf(theta, config.window_rope_scaling)
    ropes = {"full_attention": shared["rope_parameters"], "sliding_attention": local}
    return {
        **shared,
        **gemma2_fields(config),
        "rope_local_base_freq": theta,
        "rope_parameters": ropes,
    }
