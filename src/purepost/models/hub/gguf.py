"""Models in one GGUF file: configuration, weights under their Hugging Face names, and tokenizer.

Quantised tensors come out as the float32 values they stand for. llama.cpp interleaves the two
halves of each head's query and key rows (its RoPE turns neighbours); here they are put back.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from ...text.tokenizer import Tokenizer

Tensor = Float[np.ndarray, "..."]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration


class Gguf(NamedTuple):
    """What a GGUF file holds; tensors are read when they are asked for."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer


class GgufTensors(Mapping[str, Tensor]):
    """A file's tensors by Hugging Face name, each made float32 when it is asked for."""

    def __init__(self, stored: Mapping[str, Any], num_heads: int, num_kv_heads: int) -> None:
        """`stored`: the reader's tensors by Hugging Face name."""
        self._stored = dict(stored)
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads}

    def __getitem__(self, name: str) -> Tensor:
        value = _dequantize(name, self._stored[name])
        heads = self._heads.get(name.split(".")[-2])
        return value if heads is None else _halves(value, heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_gguf(path: Path) -> Gguf:
    """Read a GGUF file of the llama architecture.

    Raises: FileNotFoundError, ModuleNotFoundError without the `gguf` package, ValueError for a file
    that is no GGUF, or an architecture, position scaling or vocabulary that is not supported.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a GGUF file at {path}, found none; check the path")
    try:
        from .gguf_reader import Reader
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package gguf, got none; install purepost[gguf]", name="gguf"
        ) from error
    try:
        reader = Reader(str(path))
    except ValueError as error:
        raise ValueError(f"expected a GGUF file at {path}, got {error}; fetch it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"expected a GGUF file of architecture 'llama', got {architecture!r}; "
            "load this model in Hugging Face layout"
        )
    tokenizer = Tokenizer.from_gguf(fields)
    found = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, found, tokenizer)
    named = {_hf_name(name): tensor for name, tensor in found.items() if name != _ROPE_FACTORS}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return Gguf(config, GgufTensors(named, heads, kv_heads), tokenizer)


def _config(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The configuration as Hugging Face writes it."""

    def need(name: str) -> Any:
        if f"llama.{name}" not in fields:
            raise ValueError(f"expected llama.{name} in the GGUF file, got none; make it again")
        return fields[f"llama.{name}"]

    if fields.get("llama.expert_count"):
        raise ValueError("expected a dense model, got a mixture of experts; load another model")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(f"llama.{name}", head_dim) != head_dim:
            raise ValueError(
                f"expected llama.{name} to equal the head size {head_dim}, "
                f"got {fields[f'llama.{name}']}; load another model"
            )
    context = need("context_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, tensors.get(_ROPE_FACTORS), head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_ids[0],
        "pad_token_id": tokenizer.pad_id,
    }


def _rope_scaling(
    fields: Mapping[str, Any], factors: Any | None, head_dim: int
) -> dict[str, Any] | None:
    """How positions are scaled, as Hugging Face writes it; None where they are not."""
    if factors is not None:
        theta = fields.get("llama.rope.freq_base", 10000.0)
        return _llama3_scaling(_dequantize(_ROPE_FACTORS, factors).ravel(), theta, head_dim)
    kind = fields.get("llama.rope.scaling.type", "none")
    factor = fields.get("llama.rope.scaling.factor", fields.get("llama.rope.scale_linear"))
    if kind == "none" and factor in (None, 1.0):
        return None
    original = fields.get("llama.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    return (
        scaling if original is None else {**scaling, "original_max_position_embeddings": original}
    )


def _llama3_scaling(
    factors: Float[np.ndarray, " k"], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """Llama 3's rule from the table of its results, the only form this format keeps.

    A wavelength λ above `original` has its frequency divided by the factor, one below a quarter of
    `original` keeps it, and between them the two are mixed linearly in original/λ.
    """
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    factor = float(factors.max())
    if factor == 1.0:
        return None
    for original in (8192, 4096, 16384, 32768):
        smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": _short(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        "expected rope_freqs.weight to follow Llama 3's rule, got other factors; "
        "load this model in Hugging Face layout"
    )


def _hf_name(name: str) -> str:
    """A tensor's Hugging Face name; one that has none keeps its own, and shows as unexpected."""
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _LAYER:
        return f"model.layers.{block[1]}.{_LAYER[block[2]]}.{block[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _dequantize(name: str, stored: Any) -> Tensor:
    """The float32 values of a stored tensor."""
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(stored.data, stored.tensor_type), np.float32)
    except RuntimeError as error:
        raise ValueError(
            f"expected {name} in a type that can be read, got {stored.tensor_type.name}; "
            "use a file of another quantisation"
        ) from error


def _halves(value: Float[np.ndarray, "o *i"], heads: int) -> Float[np.ndarray, "o *i"]:
    """Each head's rows from interleaved pairs back to two halves."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def _short(value: float) -> float:
    """The decimal number that was stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
