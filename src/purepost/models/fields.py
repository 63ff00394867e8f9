"""Reading and writing config.json, as far as families share it.

A field is read, or it is neutral (nothing that it says changes the maths), or it is an error.
"""

from collections.abc import Mapping
from typing import Any

from .config import Config
from .rope import RopeScaling, yarn_attention_factor

Json = Mapping[str, Any]
Neutral = Mapping[str, tuple[Any, ...]]  # field → the values that change nothing

LARGEST = 2**31 - 1
MOST_LAYERS = 4096

_TRAINED = ("factor", "original_max_position_embeddings")
_MSCALES = ("mscale", "mscale_all_dim")

# Every family reads these.
SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters "
    "tie_word_embeddings max_position_embeddings model_type"
).split()

# What no family's maths depends on, whatever it says: names, dtypes, special ids, initialisation,
# what a forward pass returns beside its logits, and defaults of sampling.
COSMETIC = frozenset(
    """
    architectures auto_map torch_dtype dtype transformers_version name_or_path use_cache
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id bos_token eos_token pad_token initializer_range initializer_factor
    output_hidden_states output_attentions output_router_logits return_dict return_dict_in_generate
    output_scores torchscript use_bfloat16 tf_legacy_loss router_aux_loss_coef problem_type id2label
    label2id num_labels finetuning_task task_specific_params tokenizer_class prefix
    pretraining_tp chunk_size_feed_forward cache_implementation attn_implementation
    transformers.js_config is_llama_config unsloth_version unsloth_fixed max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)

# Fields of many families, and the values at which they change nothing here.
NEUTRAL: Neutral = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "resid_dropout": (0, None),
    "classifier_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "tie_last_hidden_states": (True, None),
}


def check_fields(config: Json, *, reads: tuple[str, ...], neutral: Neutral) -> None:
    """Raise ValueError for a field that is neither read, nor at a value that changes nothing."""
    family = config.get("model_type")
    values = {**NEUTRAL, **neutral}
    for name, value in config.items():
        if name in SHARED or name in reads or name in COSMETIC or name.startswith("_"):
            continue
        if name not in values:
            raise ValueError(
                f"expected only fields of a {family} in config.json, got {name} = {value!r}, which "
                "may change what the model computes; remove it if it does not"
            )
        if value not in values[name]:
            raise ValueError(
                f"expected {name} = {values[name][0]!r} of a {family}, got {value!r}; "
                "this variant is not supported"
            )


def integer(config: Json, name: str, default: int | None = None, *, most: int = LARGEST) -> int:
    """A whole number from 1; null is the default."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(
            f"expected {name} in config.json to be a whole number from 1 to {most}, got {value!r}"
        )
    return value


def number(config: Json, name: str, default: float | None = None) -> float:
    """A finite number above 0; null is the default."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"expected {name} in config.json to be a number above 0, got {value!r}")
    return float(value)


def optional_number(config: Json, name: str, default: float | None = None) -> float | None:
    """A number above 0, None where the field says null, the default where it is missing."""
    if name not in config:
        return default
    return None if config[name] is None else number(config, name)


def flag(config: Json, name: str, default: bool) -> bool:
    """True or false; null is the default."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} in config.json to be true or false, got {value!r}")
    return value


def table(config: Json, name: str) -> Json:
    """An object; null is an empty one."""
    value = config.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {name} in config.json to be an object, got {value!r}")
    return value


def rope_of(parameters: Json, theta: float, max_positions: int) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of one set of RoPE parameters; `theta`: the base where they name none."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": (*_TRAINED, "low_freq_factor", "high_freq_factor"),
        "yarn": (*_TRAINED, "attention_factor", "beta_fast", "beta_slow", *_MSCALES, "truncate"),
        "proportional": ("factor", "partial_rotary_factor"),
    }
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"expected a RoPE type of {', '.join(known)}, got {kind!r}")
    allowed = {"rope_type", "type", "rope_theta", *known[kind]}
    unknown = {k: v for k, v in parameters.items() if k not in allowed and v is not None}
    if unknown and unknown != {"partial_rotary_factor": 1.0}:
        raise ValueError(f"expected RoPE parameters of the type {kind}, got also {unknown}")
    try:
        theta = number(parameters, "rope_theta", theta)
        if theta <= 1:
            raise ValueError(f"expected rope_theta in config.json to be above 1, got {theta}")
        scaling = None if kind == "default" else _scaling(kind, parameters, max_positions)
    except ValueError as error:
        raise ValueError(f"RoPE of the type {kind}: {error}") from error
    return theta, scaling


def _scaling(kind: str, p: Json, max_positions: int) -> RopeScaling:
    """The stretching of one kind."""
    factor = number(p, "factor", 1.0 if kind == "proportional" else None)
    original = integer(p, "original_max_position_embeddings", max_positions)
    match kind:
        case "linear":
            return RopeScaling(kind, factor)
        case "llama3":
            low, high = number(p, "low_freq_factor"), number(p, "high_freq_factor")
            return RopeScaling(kind, factor, low, high, original)
        case "dynamic":
            return RopeScaling(kind, factor, original_max_positions=original)
        case "proportional":
            return RopeScaling(kind, factor, rotated=number(p, "partial_rotary_factor", 1.0))
    mscales = (optional_number(p, name) or 0.0 for name in _MSCALES)
    return RopeScaling(
        kind,
        factor,
        original_max_positions=original,
        attention_factor=number(p, "attention_factor", yarn_attention_factor(factor, *mscales)),
        beta_fast=number(p, "beta_fast", 32.0),
        beta_slow=number(p, "beta_slow", 1.0),
        truncate=flag(p, "truncate", True),
    )


def shared_config(
    config: Json, *, head_dim: int | None = None, tied: bool = False, rope_theta: float = 10000.0
) -> Config:
    """The Config of the fields that all families share; the defaults are the family's.

    A head's default width is hidden_size / num_attention_heads.
    """
    heads = integer(config, "num_attention_heads")
    hidden = integer(config, "hidden_size")
    positions = integer(config, "max_position_embeddings")
    parameters = table(config, "rope_parameters") or table(config, "rope_scaling")
    theta, scaling = rope_of(parameters, number(config, "rope_theta", rope_theta), positions)
    return Config(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=integer(config, "num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", heads),
        head_dim=integer(config, "head_dim", head_dim or hidden // heads),
        norm_eps=number(config, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=flag(config, "tie_word_embeddings", tied),
        max_positions=positions,
    )


def windows_of(config: Json, num_layers: int, otherwise: list[str]) -> tuple[int | None, ...]:
    """The windows that `layer_types` and `sliding_window` say; `otherwise`: the types without."""
    types = config.get("layer_types")
    types = otherwise if types is None else types
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"expected layer_types of {num_layers} layers in config.json, got {types}")
    wrong = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
    if wrong:
        raise ValueError(
            f"expected layer_types of sliding_attention or full_attention, got {wrong[0]!r}"
        )
    if "sliding_attention" not in types:
        return ()
    window = integer(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """One set of RoPE parameters."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    more: dict[str, Any] = {}
    if scaling.kind in ("llama3", "yarn"):
        more["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        more |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        more |= {
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    factor: dict[str, Any] = {"factor": scaling.factor}
    if scaling.kind == "proportional":
        more["partial_rotary_factor"] = scaling.rotated
        factor = factor if scaling.factor != 1 else {}
    return {"rope_type": scaling.kind, "rope_theta": theta, **factor, **more}


def shared_to_hf(config: Config, architecture: str) -> dict[str, Any]:
    """The fields that all families share, as transformers reads them."""
    rope = rope_to_hf(config.rope_theta, config.rope_scaling)
    scaling = config.rope_scaling
    positions = config.max_positions
    if scaling is not None and scaling.kind == "dynamic":
        positions = scaling.original_max_positions
    return {
        "architectures": [architecture],
        "model_type": config.family,
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
        "rope_scaling": None if scaling is None else dict(rope),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": positions,
    }


def layer_types(config: Config) -> list[str]:
    """The type of every layer, as transformers names them."""
    return [
        "full_attention" if window is None else "sliding_attention"
        for window in config.layer_windows
    ]


def window_of(config: Config) -> int | None:
    """The one window of the layers that have one; several sizes cannot be written."""
    sizes = {window for window in config.windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"expected windows of one size in a {config.family}, got {sorted(sizes)}")
    return next(iter(sizes), None)
