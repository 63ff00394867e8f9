"""Which family file reads and writes which `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import gemma, gemma2, gemma3, gemma4, llama, mistral, qwen2, qwen3, qwen3_moe
from ..config import Config
from ..names import DENSE


class Family(NamedTuple):
    """A family's configuration in both directions, and its names (see `models/names.py`)."""

    config_from_hf: Callable[[Mapping[str, Any]], Config]
    config_to_hf: Callable[[Config], dict[str, Any]]
    names: Mapping[str, tuple[str, bool]]
    file: str  # below src/purepost
    models: str  # who they are, in a line
    has: str  # what it has that Llama has not


def _family(module: Any, file: str, models: str, has: str) -> Family:
    path = f"models/{file}.py"
    return Family(module.config_from_hf, module.config_to_hf, module.NAMES, path, models, has)


# By `model_type`. The tests run over this table, and README shows it.
FAMILIES: Mapping[str, Family] = {
    "llama": _family(
        *(llama, "llama", "Llama 2, 3, 3.1, 3.2, SmolLM2"),
        "RoPE stretched linearly, dynamically, by Llama 3.1's rule or YaRN, as in every family",
    ),
    "mistral": _family(mistral, "mistral", "Mistral 7B", "sliding windows"),
    "qwen2": _family(
        *(qwen2, "qwen2", "Qwen2, Qwen2.5, their R1 distillations"),
        "biases of queries, keys and values",
    ),
    "qwen3": _family(qwen3, "qwen3", "Qwen3, dense", "norms of queries and keys"),
    "qwen3_moe": _family(
        *(qwen3_moe, "qwen3_moe", "Qwen3 30B-A3B, 235B-A22B"),
        "experts in all layers or some, no token dropped; `balance.with_load_balancing`",
    ),
    "gemma": _family(gemma, "gemma", "Gemma 2B, 7B", "GELU, scaled embeddings, norms of 1 + scale"),
    "gemma2": _family(
        gemma2, "gemma2", "Gemma 2", "soft-caps, norms before and after, alternating windows"
    ),
    "gemma3_text": _family(
        gemma3, "gemma3", "Gemma 3, text", "five windows to one full layer, a RoPE for each kind"
    ),
    "gemma4_text": _family(
        *(gemma4, "gemma4", "Gemma 4, text"),
        "layers of several widths, shared keys and values, inputs of every layer, "
        "experts beside MLPs",
    ),
}


def family_of(model_type: str | None) -> Family:
    """The family of a `model_type` in config.json, or of a Config's `family`.

    Raises: ValueError for one that is not supported.
    """
    found = FAMILIES.get(model_type or "")
    if found is None:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"expected model_type {known}, got {model_type!r}; load a model of one of those"
        )
    return found


def names_of(config: Config) -> Mapping[str, tuple[str, bool]]:
    """The names of a model's leaves. Where its layers are several stacks, a leaf is named by
    the first layer of its stack: "layers.4.attention.q".
    """
    names = family_of(config.family).names
    if len(config.runs) == 1:
        return names
    out = {name: entry for name, entry in names.items() if not name.startswith("layers.")}
    for run in config.runs:
        kind = config.kinds[run.start]
        dense = {} if kind.experts or not config.dense_layers else DENSE
        for name, entry in {**names, **dense}.items():
            stem, _, rest = name.partition(".")
            if stem == "layers":
                out[f"layers.{run.start}.{rest}"] = entry
    return out


def model_table() -> str:
    """README's table of the families."""
    rows = [f"| `{name}` ({f.models}) | {f.has} | {f.file} |" for name, f in FAMILIES.items()]
    return "\n".join(["| model family | beside Llama's | file |", "|---|---|---|", *rows])
