"""The Gemma 4 text family: heads of the layers without a window are wider and may have keys for
values, the last layers attend to the keys and values of earlier ones, and every layer is told anew
what the token is, or has a mixture of experts beside its MLP.
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
    optional_number,
    rope_of,
    rope_to_hf,
    shared_config,
    shared_to_hf,
    table,
    window_of,
    windows_of,
)
from .gemma import GELU, as_gemma
from .gemma3 import PATTERN, ropes
from .names import DENSE, POST_NORMS, QK_NORM

_LAYER = "model.layers.{}."

NAMES = {
    **DENSE,
    **POST_NORMS,
    **QK_NORM,
    "layers.scale": (_LAYER + "layer_scalar", False),
    "layers.input.gate": (_LAYER + "per_layer_input_gate.weight", True),
    "layers.input.out": (_LAYER + "per_layer_projection.weight", True),
    "layers.input.norm": (_LAYER + "post_per_layer_input_norm.weight", False),
    "layers.experts.norm": (_LAYER + "pre_feedforward_layernorm_2.weight", False),
    "layers.experts.router_norm": (_LAYER + "router.scale", False),
    "layers.experts.post_norm": (_LAYER + "post_feedforward_layernorm_2.weight", False),
    "layers.experts.mlp_post_norm": (_LAYER + "post_feedforward_layernorm_1.weight", False),
    "layers.experts.mlp.router": (_LAYER + "router.proj.weight", True),
    "layers.experts.mlp.scale": (_LAYER + "router.per_expert_scale", False),
    **{
        f"layers.experts.mlp.{side}": (f"{_LAYER}experts.{side}_proj", True)
        for side in ("gate", "up", "down")
    },
    "layer_inputs.embed": ("model.embed_tokens_per_layer.weight", False),
    "layer_inputs.project": ("model.per_layer_model_projection.weight", True),
    "layer_inputs.norm": ("model.per_layer_projection_norm.weight", False),
}

_READS = (
    *("sliding_window", "layer_types", "final_logit_softcapping", "per_layer_config"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers"),
    *("use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
)
_NEUTRAL = {
    "hidden_act": GELU,
    "hidden_activation": GELU,
    "use_bidirectional_attention": (None, False, "vision"),  # of images alone
}
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def config_from_hf(config: Json) -> Config:
    """Our Config from a `config.json`. What would change the maths is an error."""
    check_fields(config, reads=_READS, neutral=_NEUTRAL)
    full, local = ropes(config)
    plain = {**config, "rope_parameters": full or _FULL_ROPE, "rope_scaling": None}
    shared = as_gemma(shared_config(plain, head_dim=256, tied=True, rope_theta=1e6), "gemma4_text")
    theta, scaling = rope_of(local, 10000.0, shared.max_positions)
    types = [
        "sliding_attention" if (i + 1) % PATTERN else "full_attention"
        for i in range(shared.num_layers)
    ]
    windows = windows_of({"sliding_window": 512, **config}, shared.num_layers, types)
    if windows:  # as transformers has it, whatever the types say
        windows = (*windows[:-1], None)
    shared = replace(shared, windows=windows)
    keys_as_values = flag(config, "attention_k_eq_v", False)
    head_dim, kv_heads = _full_heads(config, shared, own=keys_as_values)
    inputs = _count(config, "hidden_size_per_layer_input", 256)
    experts = flag(config, "enable_moe_block", False)
    return replace(
        shared,
        norm_offset=0.0,
        query_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scale=True,
        final_softcap=optional_number(config, "final_logit_softcapping"),
        window_rope_theta=theta,
        window_rope_scaling=scaling,
        full_head_dim=head_dim,
        full_kv_heads=kv_heads,
        full_keys_as_values=keys_as_values,
        shared_kv_layers=_count(config, "num_kv_shared_layers", 0),
        wide_shared_mlp=flag(config, "use_double_wide_mlp", False),
        layer_input_size=inputs,
        layer_input_vocab=integer(config, "vocab_size_per_layer_input", 262144) if inputs else 0,
        num_experts=integer(config, "num_experts") if experts else 0,
        experts_per_token=integer(config, "top_k_experts") if experts else 0,
        normalize_experts=experts,
        side_expert_size=integer(config, "moe_intermediate_size") if experts else 0,
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    shared = shared_to_hf(config, "Gemma4ForCausalLM")
    theta = 10000.0 if config.window_rope_theta is None else config.window_rope_theta
    local = rope_to_hf(theta, config.window_rope_scaling)
    del shared["rope_theta"], shared["rope_scaling"]
    return {
        **shared,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": shared["rope_parameters"],
            "sliding_attention": local,
        },
        "sliding_window": window_of(config) or 512,
        "layer_types": layer_types(config),
        "final_logit_softcapping": config.final_softcap,
        "global_head_dim": config.full_head_dim,
        "num_global_key_value_heads": config.full_kv_heads,
        "attention_k_eq_v": config.full_keys_as_values,
        "num_kv_shared_layers": config.shared_kv_layers,
        "use_double_wide_mlp": config.wide_shared_mlp,
        "hidden_size_per_layer_input": config.layer_input_size,
        "vocab_size_per_layer_input": config.layer_input_vocab or config.vocab_size,
        "enable_moe_block": config.num_experts > 0,
        "num_experts": config.num_experts or None,
        "top_k_experts": config.experts_per_token or None,
        "moe_intermediate_size": config.side_expert_size or None,
    }


def _full_heads(config: Json, shared: Config, *, own: bool) -> tuple[int, int | None]:
    """Width and number of the key heads of the layers without a window: by fields of their own,
    or layer by layer, as transformers writes them. Their number may be another where `own`.
    """
    count = config.get("num_global_key_value_heads")
    kv_heads = None if count is None or not own else integer(config, "num_global_key_value_heads")
    usual = {"head_dim": integer(config, "global_head_dim", 512)}
    usual["num_key_value_heads"] = kv_heads or shared.num_kv_heads
    if not config.get("per_layer_config"):
        return usual["head_dim"], kv_heads
    plain = {"head_dim": shared.head_dim, "num_key_value_heads": shared.num_kv_heads}
    layers = table(config, "per_layer_config")
    found = [{**plain, **table(layers, str(i))} for i in range(shared.num_layers)]
    full = [found[i] for i, window in enumerate(shared.layer_windows) if window is None]
    local = [found[i] for i, window in enumerate(shared.layer_windows) if window is not None]
    alike = all(one == plain for one in local) and all(one == full[0] for one in full)
    if not alike or set(full[0]) != set(plain) or set(layers) - set(map(str, range(len(found)))):
        raise ValueError(
            "expected per_layer_config to say head_dim and num_key_value_heads of all layers "
            f"without a window alike, and nothing else, got {layers!r:.200}"
        )
    heads = integer(full[0], "num_key_value_heads")
    if heads != shared.num_kv_heads and not own:
        raise ValueError(
            "expected as many keys in the layers without a window where attention_k_eq_v is "
            f"false, got {heads}, not {shared.num_kv_heads}"
        )
    return integer(full[0], "head_dim"), heads if own else None


def _count(config: Json, name: str, default: int) -> int:
    """A whole number from 0; null is the default."""
    value = config.get(name)
    return 0 if (default if value is None else value) == 0 else integer(config, name, default)
