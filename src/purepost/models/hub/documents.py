"""The JSON beside a model's weights, read with suspicion: what is no object, names a key twice, or
says sizes that no model has is a ValueError, whatever is wrong with it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...text.tokenizer import Tokenizer
from ..decoder import Config
from .families import Family, family_of
from .multimodal import MULTIMODAL

_MOST_BYTES = 2**27
# No model has larger ones, and the product of any four can be counted in 64 bits.
_MOST_SIZES = {"vocab_size": 2**24, "vocab_size_per_layer_input": 2**24, "num_experts": 2**11}
_MOST_WIDTH = 2**19


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: ValueError for anything else."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"expected at most {_MOST_BYTES} bytes in {path}, got more; fetch it again"
        )
    return parse_object(path.read_bytes(), str(path))


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a text. Raises: ValueError for anything else, and a key given twice."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {where}, got: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object in {where}, got {value!r:.80}; fetch it again")
    return value


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as a file."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def parse_config(hf_config: Mapping[str, Any]) -> tuple[Family, Config]:
    """The family and our Config of a config.json.

    Raises: ValueError for a model that is not supported, and for what is missing or makes no sense.
    """
    kind = hf_config.get("model_type")
    if isinstance(hf_config.get("text_config"), Mapping):
        raise ValueError(
            f"expected a model of text alone, or {', '.join(MULTIMODAL)}, got {kind!r:.80}, which "
            "reads other things too; save its text model by itself, and load that"
        )
    family = family_of(kind if isinstance(kind, str) else None)
    try:
        config = family.config_from_hf(hf_config)
    except KeyError as error:
        raise ValueError(f"expected {error} in config.json, got none; fetch it again") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(
            f"expected a config.json of model_type {kind!r}, got values that do not fit: {error}; "
            "fetch it again"
        ) from error
    sizes = {
        "vocab_size": config.vocab_size,
        "vocab_size_per_layer_input": config.layer_input_vocab,
        "hidden_size": config.hidden_size,
        "intermediate_size": max(kind.intermediate_size for kind in config.kinds),
        "num_attention_heads · head_dim": max(
            max(config.num_heads, kind.kv_heads) * kind.head_dim for kind in config.kinds
        ),
        "num_hidden_layers · hidden_size_per_layer_input": (
            config.num_layers * config.layer_input_size
        ),
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.side_expert_size,
    }
    for name, size in sizes.items():
        most = _MOST_SIZES.get(name, _MOST_WIDTH)
        if size > most:
            raise ValueError(f"expected {name} in config.json up to {most}, got {size}")
    return family, config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for the JSON parser."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r:.80} more than once")
        found[name] = value
    return found


def make_config(config: Config, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """The config.json of a model in `dtype` and its tokenizer."""
    eos_ids = tokenizer.eos_ids
    return {
        **family_of(config.family).config_to_hf(config),
        "dtype": dtype,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
