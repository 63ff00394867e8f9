"""Models in one GGUF file: configuration, weights under their Hugging Face names, and tokenizer.

Quantised tensors come out as the float32 values they stand for, or as codes and scales. What
llama.cpp's converter changes is put back: the two halves of each head's query and key rows, which
it interleaves for a Llama (its RoPE turns neighbours); Gemma's norms, which it stores with 1 added;
the experts of a layer, which it stacks. A Gemma 4's norms stay as they are.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from ...text.tokenizer import Tokenizer
from .gguf_config import Stretch, config_from_gguf

Tensor = Float[np.ndarray, "..."]

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Gemma 2, 3 and 4 have a norm after attention and MLP as well as before.
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_SCALE = "layer_output_scale"  # whose name there has no ".weight"
_EXPERTS = {f"ffn_{kind}_exps": f"mlp.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")}
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration


class Gguf(NamedTuple):
    """What a GGUF file holds; tensors are read when they are asked for."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer


class _Source(NamedTuple):
    """Where a tensor of Hugging Face's comes from."""

    stored: Any  # gguf_reader.Stored
    expert: int | None = None


class GgufTensors(Mapping[str, Tensor]):
    """A file's tensors by Hugging Face name, each made float32 when it is asked for."""

    def __init__(self, architecture: str, tensors: Mapping[str, Any], config: Mapping[str, Any]):
        """`tensors`: what the file holds, by its own names."""
        self._sources: dict[str, _Source] = {}
        for name, stored in tensors.items():
            if name != _ROPE_FACTORS:
                self._sources.update(_sources(name, stored, architecture))
        self._heads = dict[str, int]()
        if architecture == "llama":
            self._heads["q_proj"] = config["num_attention_heads"]
            self._heads["k_proj"] = config["num_key_value_heads"]
        self._shifted = architecture in ("gemma", "gemma2", "gemma3")

    def __getitem__(self, name: str) -> Tensor:
        value = self._stored(name).values()
        if self._shifted and name.endswith("norm.weight"):
            value -= 1
        heads = self._heads.get(name.split(".")[-2])
        return value if heads is None else _halves(name, value, heads)

    def blocks(self, name: str) -> Any:
        """Its `gguf_blocks.Blocks`, where its type is one of ours; else None."""
        from .gguf_blocks import blocks_of

        found, heads = blocks_of(self._stored(name)), self._heads.get(name.split(".")[-2])
        if found is None or heads is None:
            return found
        return type(found)(*(_halves(name, part, heads) for part in found))

    def _stored(self, name: str) -> Any:
        stored, expert = self._sources[name]
        if expert is None:
            return stored
        return stored._replace(shape=stored.shape[1:], data=stored.data[expert])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def read_gguf(path: Path) -> Gguf:
    """Read a GGUF file of an architecture that one of our families is.

    Raises: FileNotFoundError, ModuleNotFoundError without the `gguf` package, ValueError for a file
    that is no GGUF, or an architecture, position scaling or vocabulary that is not supported.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a GGUF file at {path}, found none; check the path")
    try:
        from .gguf_reader import read_header
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package gguf, got none; install purepost[gguf]", name="gguf"
        ) from error
    fields, stored = read_header(path)
    factors = stored.get(_ROPE_FACTORS)
    stretch: Stretch | None = None if factors is None else factors.values().ravel()
    config = config_from_gguf(fields, {name: x.shape for name, x in stored.items()}, stretch)
    tokenizer = Tokenizer.from_gguf(fields)
    config["bos_token_id"], config["pad_token_id"] = tokenizer.bos_id, tokenizer.pad_id
    config["eos_token_id"] = tokenizer.eos_ids[0]
    return Gguf(config, GgufTensors(fields["general.architecture"], stored, config), tokenizer)


def _sources(name: str, stored: Any, architecture: str) -> dict[str, _Source]:
    """Of a stored tensor, the Hugging Face names and what each is of it. A tensor that has no such
    name keeps its own, and shows as unexpected.
    """
    layer = {**_LAYER}
    if architecture in ("gemma2", "gemma3", "gemma4"):
        layer |= _FOUR_NORMS
    if architecture == "gemma4":
        layer |= _INPUTS
    block = _BLOCK.fullmatch(name)
    if block and block[2] == _SCALE:
        return {f"model.layers.{block[1]}.layer_scalar": _Source(stored)}
    if block and block[2] in layer:
        return {f"model.layers.{block[1]}.{layer[block[2]]}.{block[3]}": _Source(stored)}
    if block and block[2] in _EXPERTS and len(stored.shape) == 3:
        stem = f"model.layers.{block[1]}.{_EXPERTS[block[2]]}.{block[3]}"
        return {stem.format(i): _Source(stored, i) for i in range(stored.shape[0])}
    top, _, kind = name.rpartition(".")
    return {f"{_TOP[top]}.{kind}" if top in _TOP else name: _Source(stored)}


def _halves(name: str, value: Shaped[np.ndarray, "o *i"], heads: int) -> Shaped[np.ndarray, "o *i"]:
    """Each head's rows from interleaved pairs back to two halves."""
    if value.shape[0] % (2 * heads):
        raise ValueError(
            f"expected rows of {heads} heads of even size in {name}, got {value.shape[0]}; "
            "make the file again"
        )
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
