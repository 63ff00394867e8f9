"""The Qwen3 family of experts: Qwen3's attention, and a mixture of experts in every layer, or in
some.

Source: Yang et al., Qwen3, 2505.09388, §2.
"""

from dataclasses import replace
from typing import Any

from .config import Config
from .fields import Json, check_fields, flag, integer, shared_config, shared_to_hf, window_of
from .names import DENSE, EXPERTS, QK_NORM
from .qwen3 import QWEN3_0_6B

NAMES = {**DENSE, **QK_NORM, **EXPERTS}

_READS = (
    *("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("norm_topk_prob", "use_sliding_window", "sliding_window"),
    *("decoder_sparse_step", "mlp_only_layers"),
)
_NEUTRAL = {
    "hidden_act": ("silu",),
    "max_window_layers": tuple(range(4097)),  # of no use in this family
}

QWEN3_30B_A3B = replace(
    QWEN3_0_6B,
    hidden_size=2048,
    intermediate_size=768,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    tie_embeddings=False,
    family="qwen3_moe",
    num_experts=128,
    experts_per_token=8,
    normalize_experts=True,
)


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=_READS, neutral=_NEUTRAL)
    shared = shared_config(config)
    windows: tuple[int | None, ...] = ()
    if flag(config, "use_sliding_window", False) and config.get("sliding_window", 0) is not None:
        windows = (integer(config, "sliding_window", 4096),) * shared.num_layers
    dense = _dense_layers(config, shared.num_layers)
    return replace(
        shared,
        family="qwen3_moe",
        qk_norm=True,
        windows=windows,
        intermediate_size=integer(config, "moe_intermediate_size", 768),
        num_experts=integer(config, "num_experts", integer(config, "num_local_experts", 128)),
        experts_per_token=integer(config, "num_experts_per_tok", 8),
        normalize_experts=flag(config, "norm_topk_prob", False),
        dense_layers=dense,
        dense_intermediate_size=shared.intermediate_size if dense else 0,
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    window = window_of(config)
    return {
        **shared_to_hf(config, "Qwen3MoeForCausalLM"),
        "intermediate_size": config.dense_intermediate_size or config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _dense_layers(config: Json, count: int) -> tuple[int, ...]:
    """The layers that have an MLP: those listed, and all but every n-th."""
    listed = config.get("mlp_only_layers") or []
    every = integer(config, "decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise ValueError(f"expected numbers of layers as mlp_only_layers, got {listed!r:.80}")
    dense = tuple(i for i in range(count) if i in listed or (i + 1) % every)
    if len(dense) == count:
        raise ValueError(
            f"expected experts in some layer of a qwen3_moe, got mlp_only_layers {listed!r:.80} "
            f"and decoder_sparse_step {every}; a model without any is a qwen3"
        )
    return dense
