"""The Llama family: Llama 2, 3, 3.1, 3.2, SmolLM2 and everything else that says
`LlamaForCausalLM`.
"""

from collections.abc import Mapping
from typing import Any

from .decoder import Config
from .layers import RopeScaling

# Path of our leaf → (name in a Hugging Face checkpoint, whether it is stored transposed, [out,
# in]). `{}` is the layer: our leaf stacks all layers on its first axis.
NAMES: dict[str, tuple[str, bool]] = {
    "embed": ("model.embed_tokens.weight", False),
    "layers.attention_norm": ("model.layers.{}.input_layernorm.weight", False),
    "layers.attention.q": ("model.layers.{}.self_attn.q_proj.weight", True),
    "layers.attention.k": ("model.layers.{}.self_attn.k_proj.weight", True),
    "layers.attention.v": ("model.layers.{}.self_attn.v_proj.weight", True),
    "layers.attention.o": ("model.layers.{}.self_attn.o_proj.weight", True),
    "layers.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", False),
    "layers.mlp.gate": ("model.layers.{}.mlp.gate_proj.weight", True),
    "layers.mlp.up": ("model.layers.{}.mlp.up_proj.weight", True),
    "layers.mlp.down": ("model.layers.{}.mlp.down_proj.weight", True),
    "norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
}

SMOLLM2_135M = Config(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
    max_positions=8192,
)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a Hugging Face config, in its older and its newer spelling."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", float(parameters["factor"]))
        case "llama3":
            return theta, RopeScaling(
                "llama3",
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(parameters["original_max_position_embeddings"]),
            )
    raise ValueError(f"expected a RoPE type of default, linear or llama3, got {kind!r}")


def config_from_hf(config: Mapping[str, Any]) -> Config:
    """Our Config from a `config.json`.

    What would change the maths and is not known here is an error.
    """
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(f"expected {name} = {value!r} of a Llama, got {config[name]!r}")
    theta, scaling = _rope(config)
    heads = int(config["num_attention_heads"])
    return Config(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config["max_position_embeddings"]),
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The `config.json` that transformers reads as this model."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": None if config.rope_scaling is None else dict(rope),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
    }
