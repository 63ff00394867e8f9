"""LoRA adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

On disk lora_A is [r, in] and lora_B [out, r], one pair per layer; ours are [layer, in, r] and
[layer, r, out].
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from ...tree import map_named, named_leaves
from ...weights import add_lora, has_adapters
from ..decoder import Decoder
from .convert import hf_names
from .families import Family, family_of
from .safetensors import read_file, save_tensors, write_directory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])(?:\.default)?\.weight")


class _Adapter(NamedTuple):
    """One of our adapted weights: its two matrices and their scale."""

    a: Float[Array, "l i r"]
    b: Float[Array, "l r o"]
    scale: float
    dropout: float

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def alpha(self) -> float:
        return self.scale * self.rank


def save_adapter(model: Decoder, directory: str | Path, *, base: str) -> None:
    """Write the model's adapters; `base` names the model they belong to (a hub id or a directory).

    The scale is written as α/r, whatever rule made it. Raises: ValueError for a model without
    adapters, or when something is there already.
    """
    found = _adapters(model)
    if not found:
        raise ValueError("expected a model with adapters, got none; add_lora makes some")
    family = family_of(model.config.family)
    tensors: dict[str, Float[np.ndarray, ...]] = {}
    modules: dict[str, _Adapter] = {}
    for name, adapter in found.items():
        sources = hf_names(name, family, model.config.num_layers)
        modules[sources[0].split(".")[-2]] = adapter
        for i, source in enumerate(sources):
            stem = _PREFIX + source.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = np.asarray(adapter.a[i]).T
            tensors[f"{stem}.lora_B.weight"] = np.asarray(adapter.b[i]).T
    config = _config(modules, base)

    def write(path: Path) -> None:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (path / CONFIG).write_text(text, encoding="utf-8")
        save_tensors(path / WEIGHTS, tensors)

    write_directory(Path(directory).expanduser(), write)


def load_adapter(model: Decoder, directory: str | Path) -> Decoder:
    """The model with the adapter of a directory on it.

    Raises: FileNotFoundError without its two files; ValueError for a model that has adapters, for
    a kind of adapter that is not supported, and for keys and shapes that do not fit the model.
    """
    path = Path(directory).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise FileNotFoundError(f"expected {path / name}, found none; name an adapter's folder")
    if has_adapters(model):
        raise ValueError("expected a model without adapters, got some; merge or remove them first")
    config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    _check_supported(config)
    family = family_of(model.config.family)
    matrices = _stack(model, read_file(path / WEIGHTS), family)
    names = sorted({leaf.rpartition(".")[0] for leaf in matrices})
    settings = _settings(config, names, family, model.config.num_layers)
    for name, (rank, _) in settings.items():
        if matrices[f"{name}.a"].shape[-1] != rank:
            raise ValueError(
                f"expected rank {rank} of {name}, as {CONFIG} says, got "
                f"{matrices[f'{name}.a'].shape[-1]}; its two files belong to different adapters"
            )
    adapted = add_lora(
        model,
        where=_any_of(names),
        key=jr.key(0),  # what it draws is replaced below
        rank=1,
        rank_stabilized=bool(config.get("use_rslora")),
        ranks={_any_of([name]): rank for name, (rank, _) in settings.items()},
        alphas={_any_of([name]): alpha for name, (_, alpha) in settings.items()},
        dropout=float(config.get("lora_dropout", 0.0)),
    )
    return map_named(lambda name, x: _replace(name, x, matrices.get(name)), adapted)


def _read(w: Any) -> _Adapter | None:
    """The parts of an adapted weight, None for anything else."""
    match w:
        case eqx.Module(a=a, b=b, scale=scale, dropout=dropout):
            return _Adapter(a, b, scale, dropout)
    return None


def _replace(name: str, old: Any, new: Float[np.ndarray, "l _ _"] | None) -> Any:
    """The new matrix in float32, or the old leaf where there is none."""
    if new is None:
        return old
    if new.shape != old.shape:
        raise ValueError(
            f"expected {name} of shape {old.shape}, got {new.shape}; "
            "the adapter belongs to another model"
        )
    return jnp.array(new, jnp.float32)


def _adapters(model: Decoder) -> dict[str, _Adapter]:
    """The model's adapted weights by name."""
    leaves = named_leaves(model, lambda w: _read(w) is not None)
    read = {name: _read(leaf) for name, leaf in leaves}
    return {name: adapter for name, adapter in read.items() if adapter is not None}


def _config(modules: Mapping[str, _Adapter], base: str) -> dict[str, Any]:
    """adapter_config.json: the commonest rank and alpha, and by module what differs from them."""
    rank = Counter(adapter.rank for adapter in modules.values()).most_common(1)[0][0]
    alpha = Counter(adapter.alpha for adapter in modules.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _integral(alpha),
        "lora_dropout": max(adapter.dropout for adapter in modules.values()),
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {name: x.rank for name, x in modules.items() if x.rank != rank},
        "alpha_pattern": {
            name: _integral(x.alpha) for name, x in modules.items() if x.alpha != alpha
        },
    }


def _integral(value: float) -> int | float:
    """A whole number as one, as PEFT writes it."""
    return int(value) if value == int(value) else value


def _check_supported(config: Mapping[str, Any]) -> None:
    """Raise for what changes the maths of an adapter and is not done here."""
    expected = {
        "peft_type": "LORA",
        "bias": "none",
        "use_dora": False,
        "use_qalora": False,
        "use_bdlora": None,
        "lora_bias": False,
        "fan_in_fan_out": False,
        "layer_replication": None,
        "alora_invocation_tokens": None,
        "arrow_config": None,
        "kasa_config": None,
    }
    found = {name: config.get(name) or value for name, value in expected.items()}
    # How A and B began does not matter, unless the base weights were changed to fit them.
    start = config.get("init_lora_weights", True)
    if start not in (True, False, None, "gaussian", "orthogonal", "eva"):
        expected["init_lora_weights"], found["init_lora_weights"] = True, start
    for name, value in expected.items():
        if found[name] != value:
            raise ValueError(
                f"expected {name} = {value!r} in {CONFIG}, got {found[name]!r}; "
                "merge that adapter with the library that made it, and load the merged model"
            )


def _stack(
    model: Decoder, tensors: Mapping[str, Float[np.ndarray, "_ _"]], family: Family
) -> dict[str, Float[np.ndarray, "l _ _"]]:
    """The adapter's matrices as our leaves: "layers.attention.q.a" [l, in, r], ".b" [l, r, out].

    Raises: ValueError that lists keys of no weight of ours, layers left out, and uneven ranks.
    """
    layers = model.config.num_layers
    where = {
        source.removesuffix(".weight"): (name, i)
        for name, (pattern, _) in family.names.items()
        if "{}" in pattern and name.count(".") > 1
        for i, source in enumerate(hf_names(name, family, layers))
    }
    parts: dict[str, dict[int, Float[np.ndarray, "_ _"]]] = {}
    problems: list[str] = []
    for key in tensors:
        found = _KEY.fullmatch(key)
        if found is None or found[1] not in where:
            problems.append(f"unmatched key {key}")
            continue
        name, i = where[found[1]]
        parts.setdefault(f"{name}.{found[2].lower()}", {})[i] = tensors[key].T
    for leaf, by_layer in parts.items():
        lacking = sorted(set(range(layers)) - set(by_layer))
        shapes = sorted({matrix.shape for matrix in by_layer.values()})
        if lacking:
            problems.append(f"{leaf} lacks layers {lacking}")
        if len(shapes) > 1:
            problems.append(f"{leaf} has several shapes {shapes}")
        if f"{leaf[:-1]}{'b' if leaf[-1] == 'a' else 'a'}" not in parts:
            problems.append(f"{leaf} stands without its other half")
    if problems or not parts:
        raise ValueError(
            f"expected an adapter of every layer of this model, got: "
            f"{'; '.join(problems[:8]) or 'no matrices'}; it belongs to another model"
        )
    return {
        leaf: np.stack([by_layer[i] for i in range(layers)]) for leaf, by_layer in parts.items()
    }


def _settings(
    config: Mapping[str, Any], names: list[str], family: Family, layers: int
) -> dict[str, tuple[int, float]]:
    """Rank and alpha of each of our weights; in a stack of layers they are the same in all.

    PEFT takes the first pattern that matches the end of a module's name.
    """

    def look_up(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
        for pattern, value in (patterns or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default

    out: dict[str, tuple[int, float]] = {}
    for name in names:
        modules = [n.removesuffix(".weight") for n in hf_names(name, family, layers)]
        found = {
            (
                int(look_up(config.get("rank_pattern"), module, config["r"])),
                float(look_up(config.get("alpha_pattern"), module, config["lora_alpha"])),
            )
            for module in modules
        }
        if len(found) > 1:
            raise ValueError(
                f"expected one rank and alpha in all layers of {name}, got {sorted(found)}; "
                "merge that adapter with the library that made it, and load the merged model"
            )
        out[name] = found.pop()
    return out


def _any_of(names: list[str]) -> str:
    """A pattern that matches these names and no others."""
    return "^(" + "|".join(map(re.escape, names)) + ")$"
