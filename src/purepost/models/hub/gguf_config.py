"""A GGUF file's metadata as the config.json of the same model.

Some of a model's settings are not in such files: llama.cpp knows them by the architecture, and so
does this.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

Stretch = Float[np.ndarray, " k"]  # what each rotary frequency is divided by
Shapes = Mapping[str, tuple[int, ...]]

# Architecture → (model_type, class) in Hugging Face's words.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
}
# The largest Gemmas, by their layers, scale attention by the mean head size of the stream.
_MEAN_SCALED = {"gemma2": 46, "gemma3": 62}


class Metadata:
    """The fields of one architecture, checked when they are asked for."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._fields = fields

    def get(self, name: str) -> Any:
        """A field, None where there is none."""
        return self._fields.get(f"{self.architecture}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number ≥ 1; one that is given layer by layer is the same in all."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a whole number ≥ 1", value)
        return value

    def each(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """A whole number ≥ 1 of every layer; one that is given once is that of all."""
        value = self.get(name)
        if not isinstance(value, list):
            return [self.size(name, default)] * layers
        whole = all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in value)
        if not whole or len(value) != layers:
            raise self.wrong(name, f"{layers} whole numbers ≥ 1", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0, in the decimals it was written with: 1e-05, not 9.99999974e-06."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number", value)
        if not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0", value)
        return short(value)

    def wrong(self, name: str, expected: str, got: Any) -> ValueError:
        """The error about one field."""
        found = "none" if got is None else f"{got!r:.80}"
        return ValueError(
            f"expected {expected} as {self.architecture}.{name} in the GGUF file, got {found}; "
            "make it again, or load this model in Hugging Face layout"
        )


def config_from_gguf(
    fields: Mapping[str, Any], shapes: Shapes, stretch: Stretch | None
) -> dict[str, Any]:
    """The configuration as Hugging Face writes it.

    `shapes` are those of the file's tensors; `stretch` is its table of rotary frequencies. Raises:
    ValueError for an architecture that is not known and for fields that make no sense.
    """
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(
            f"expected a GGUF file of architecture {', '.join(map(repr, ARCHITECTURES))}, "
            f"got {architecture!r:.80}; load this model in Hugging Face layout"
        )
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ValueError("expected token_embd.weight in the GGUF file, got none; make it again")
    meta = Metadata(fields, architecture)
    if architecture in ("llama", "gemma4") and meta.get("expert_count"):
        raise ValueError("expected a dense model, got a mixture of experts; load another model")
    if architecture != "qwen2" and "blk.0.attn_q.bias" in shapes:
        raise ValueError(f"expected no biases in a {architecture}, got some; load another model")
    if architecture == "gemma4":
        return gemma4_config(meta, shapes, stretch)
    common = _common(meta, shapes, stretch)
    return {**common, **_special(meta, common)}


def _common(meta: Metadata, shapes: Shapes, stretch: Stretch | None) -> dict[str, Any]:
    """What every architecture has whose layers are of one size."""
    hidden, heads = meta.size("embedding_length"), meta.size("attention.head_count")
    head_dim = meta.size("attention.key_length", max(1, hidden // heads))
    for length in ("attention.value_length", "rope.dimension_count"):
        if meta.size(length, head_dim) != head_dim:
            raise meta.wrong(length, f"the head size {head_dim}", meta.get(length))
    theta = meta.number("rope.freq_base", 10000.0)
    return {
        **_sizes(meta, shapes),
        "intermediate_size": meta.size("feed_forward_length"),
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(meta, stretch, theta, head_dim),
    }


def _sizes(meta: Metadata, shapes: Shapes) -> dict[str, Any]:
    """What no layer differs in."""
    model_type, name = ARCHITECTURES[meta.architecture]
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": meta.size("embedding_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": meta.size("attention.head_count"),
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _special(meta: Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    """What one architecture has beside, or says in another way."""
    window = meta.get("attention.sliding_window")
    match meta.architecture:
        case "llama" if window:
            size = meta.size("attention.sliding_window")
            names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            return {"hidden_act": "silu", "sliding_window": size, **names}
        case "qwen3moe":
            return {
                "hidden_act": "silu",
                "num_experts": meta.size("expert_count"),
                "num_experts_per_tok": meta.size("expert_used_count"),
                "moe_intermediate_size": meta.size("expert_feed_forward_length"),
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case "gemma":
            return _GELU
        case "gemma2" | "gemma3":
            return {**_GELU, **_gemma(meta, common)}
    return {"hidden_act": "silu"}


_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma(meta: Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, soft-caps and scales of Gemma 2 and 3."""
    two = meta.architecture == "gemma2"
    layers, head_dim = common["num_hidden_layers"], common["head_dim"]
    if layers == _MEAN_SCALED[meta.architecture]:
        head_dim = common["hidden_size"] // common["num_attention_heads"]
    out: dict[str, Any] = {
        "query_pre_attn_scalar": head_dim,
        "sliding_window": meta.size("attention.sliding_window", 4096 if two else 1024),
        "layer_types": _layer_types(meta, layers, 2 if two else 6),
    }
    for name, field, default in (
        ("attn_logit_softcapping", "attn_logit_softcapping", 50.0 if two else None),
        ("final_logit_softcapping", "final_logit_softcapping", 30.0 if two else None),
    ):
        given = meta.get(field) is not None or default is not None
        out[name] = meta.number(field, default) if given else None
    if not two:
        out["rope_theta"] = meta.number("rope.freq_base", 1e6)
        out["rope_local_base_freq"] = meta.number("rope.freq_base_swa", 10000.0)
    return out


def gemma4_config(meta: Metadata, shapes: Shapes, stretch: Stretch | None) -> dict[str, Any]:
    """A Gemma 4: the lengths are of the layers without a window, those of the others have a name of
    their own; numbers that differ between layers are listed.
    """
    layers = meta.size("block_count")
    types = _layer_types(meta, layers, 6)
    full = types.index("full_attention") if "full_attention" in types else 0
    local = types.index("sliding_attention") if "sliding_attention" in types else full
    shared = meta.get("attention.shared_kv_layers")
    shared = meta.size("attention.shared_kv_layers") if shared else 0
    sizes = meta.each("feed_forward_length", layers)
    kv_heads = meta.each("attention.head_count_kv", layers)
    keys_as_values = f"blk.{full}.attn_v.weight" not in shapes
    inputs = meta.get("embedding_length_per_layer_input")
    cap = meta.get("final_logit_softcapping")
    out = {
        **_sizes(meta, shapes),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "num_key_value_heads": kv_heads[local],
        "num_global_key_value_heads": kv_heads[full] if keys_as_values else None,
        "head_dim": meta.size("attention.key_length_swa"),
        "global_head_dim": meta.size("attention.key_length"),
        "attention_k_eq_v": keys_as_values,
        "num_kv_shared_layers": shared,
        "layer_types": types,
        "sliding_window": meta.size("attention.sliding_window", 512),
        "final_logit_softcapping": None if cap is None else meta.number("final_logit_softcapping"),
        "hidden_size_per_layer_input": inputs or 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {
                "rope_theta": meta.number("rope.freq_base", 1e6),
                **_share_turned(stretch),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": meta.number("rope.freq_base_swa", 10000.0),
            },
        },
    }
    if inputs:
        width = shapes.get("per_layer_token_embd.weight", (out["vocab_size"],))[0]
        out["vocab_size_per_layer_input"] = width
    if out["use_double_wide_mlp"] and not shared:
        raise meta.wrong("feed_forward_length", "one size of all layers", sizes)
    return out


def _share_turned(stretch: Stretch | None) -> dict[str, Any]:
    """RoPE of which some features turn, by the table that divides the frequencies of the others by
    a number without end.
    """
    if stretch is None:
        return {"rope_type": "default"}
    turned = int((stretch == 1.0).sum())
    if not turned or not (stretch[:turned] == 1.0).all() or not (stretch[turned:] >= 1e29).all():
        raise ValueError(
            "expected rope_freqs.weight of a gemma4 to be 1, then 1e30, got other factors; "
            "load this model in Hugging Face layout"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(stretch)}


def _layer_types(meta: Metadata, layers: int, default: int) -> list[str]:
    """Which layers have a window: all but every n-th, or as the file lists."""
    name = "attention.sliding_window_pattern"
    value = meta.get(name)
    if isinstance(value, list):
        if len(value) != layers:
            raise meta.wrong(name, f"{layers} layers", value)
        slides = list(map(bool, value))
    else:
        period = meta.size(name, default)
        slides = [(i + 1) % period != 0 for i in range(min(layers, 2**16))]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rope_scaling(
    meta: Metadata, stretch: Stretch | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """How positions are scaled, as Hugging Face writes it; None where they are not."""
    if stretch is not None:
        return _llama3_scaling(stretch, theta, head_dim)
    kind = meta.get("rope.scaling.type") or "none"
    old = "rope.scale_linear"
    field = "rope.scaling.factor" if meta.get(old) is None else old
    factor = meta.number(field, 1.0)
    if kind == "none" and factor == 1.0:
        return None
    if meta.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise meta.wrong("rope.scaling.attn_factor", "1", meta.get("rope.scaling.attn_factor"))
    scaling = {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    if kind == "yarn" and meta.get("rope.scaling.original_context_length") is not None:
        original = meta.size("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(stretch: Stretch, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's rule from the table of its results, the only form this format keeps.

    A wavelength λ above `original` has its frequency divided by the factor, one below a quarter of
    `original` keeps it, and between them the two are mixed linearly in original/λ.
    """
    if (stretch == 1.0).all():
        return None
    factor = float(stretch.max())
    fits = 2 * len(stretch) == head_dim and 1.0 < factor < math.inf
    for original in (8192, 4096, 16384, 32768) if fits else ():
        frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        wavelengths = 2 * np.pi / frequencies
        smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if np.allclose(expected, stretch, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": short(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        "expected rope_freqs.weight to follow Llama 3's rule, got other factors; "
        "load this model in Hugging Face layout"
    )


def short(value: float | int) -> float:
    """The decimal number that was stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
