"""LoRA adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

On disk lora_A is [r, in] and lora_B [out, r], one pair per layer; ours are [layer, in, r] and
[layer, r, out]. Each expert has a pair of its own there, as its weights have. DoRA's magnitudes
are a vector beside each pair.
"""

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
from ...weights import add_lora, has_adapters, is_kind, shape_of
from ..decoder import Decoder
from .convert import Names, Tensor, hf_names
from .documents import read_object, write_object
from .families import names_of
from .multimodal import text_name
from .safetensors import read_file, save_tensors, write_directory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LARGEST = 1e9
_REPEATS = re.compile(r"[*+{]")  # in a pattern: each multiplies the ways to match
_SLOW = re.compile(r"\)[*+{]|\\\d")  # repeated groups and back references: ways without bound
_KEY = re.compile(
    re.escape(_PREFIX)
    + r"(.+)\.lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?"
    + r"|(magnitude)_vector(?:\.default)?(?:\.weight)?)"
)


class _Adapter(NamedTuple):
    """One of our adapted weights: its two matrices, their scale, and DoRA's magnitudes."""

    a: Float[Array, "*l i r"]
    b: Float[Array, "*l r o"]
    scale: float
    dropout: float
    magnitude: Float[Array, "*l o"] | None

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def alpha(self) -> float:
        return self.scale * self.rank


def save_adapter(model: Decoder, directory: str | Path, *, base: str) -> None:
    """Write the model's adapters; `base` names the model they belong to (a hub id or a directory).

    The scale is written as α/r, whatever rule made it. Raises: ValueError for a model without
    adapters, for adapters that PEFT does not have, or when something is there already.
    """
    found = _adapters(model)
    if not found:
        raise ValueError("expected a model with adapters, got none; add_lora makes some")
    if model.config.dense_layers and any(".mlp." in name for name in found):
        raise ValueError(
            "expected adapters of attention only where some layers have experts and others an MLP, "
            "which PEFT takes for one another; merge the model"
        )
    if any(".experts." in name for name in found):
        raise ValueError(
            "expected no adapters of experts beside an MLP, which PEFT does not take for matrices; "
            "merge the model"
        )
    _check_writable(model, found)
    names = names_of(model.config)
    tensors: dict[str, Tensor] = {}
    modules: dict[str, _Adapter] = {}
    for name, adapter in found.items():
        sources = hf_names(name, names, adapter.a.shape)
        module = sources[0].split(".")[-2]
        first = modules.setdefault(module, adapter)
        if (first.rank, first.alpha) != (adapter.rank, adapter.alpha):
            raise ValueError(
                f"expected one rank and alpha of every {module}, got {first.rank}, {first.alpha} "
                f"and {adapter.rank}, {adapter.alpha}; give all of its layers the same"
            )
        for ending, stacked, axes in _parts(name, adapter):
            each = np.asarray(stacked).reshape(-1, *stacked.shape[stacked.ndim - axes :])
            for source, part in zip(sources, each, strict=True):
                tensors[_PREFIX + source.removesuffix(".weight") + ending] = part.T
    config = _config(modules, base)

    def write(path: Path) -> None:
        write_object(path / CONFIG, config)
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
    config = read_object(path / CONFIG)
    _check_supported(config)
    names = names_of(model.config)
    dora = bool(config.get("use_dora"))
    matrices = _stack(model, read_file(path / WEIGHTS), names, dora)
    adapted_names = sorted({leaf.rpartition(".")[0] for leaf in matrices})
    modules = {
        name: [
            n.removesuffix(".weight") for n in hf_names(name, names, matrices[f"{name}.a"].shape)
        ]
        for name in adapted_names
    }
    settings = _settings(config, modules)
    for name, (rank, _) in settings.items():
        if matrices[f"{name}.a"].shape[-1] != rank:
            raise ValueError(
                f"expected rank {rank} of {name}, as {CONFIG} says, got "
                f"{matrices[f'{name}.a'].shape[-1]}; its two files belong to different adapters"
            )
    adapted = add_lora(
        model,
        where=_any_of(adapted_names),
        key=jr.key(0),  # what it draws is replaced below
        rank=1,
        rank_stabilized=bool(config.get("use_rslora")),
        ranks={_any_of([name]): rank for name, (rank, _) in settings.items()},
        alphas={_any_of([name]): alpha for name, (_, alpha) in settings.items()},
        dropout=_number(config, "lora_dropout", 0.0),
        dora=dora,
    )
    return map_named(lambda name, x: _replace(name, x, matrices.get(name)), adapted)


def _read(w: Any) -> _Adapter | None:
    """The parts of an adapted weight, None for anything else."""
    match w:
        case eqx.Module(a=a, b=b, scale=scale, dropout=dropout, magnitude=magnitude):
            return _Adapter(a, b, scale, dropout, magnitude)
    return None


def _parts(name: str, adapter: _Adapter) -> list[tuple[str, Float[Array, "..."], int]]:
    """(how the key on disk ends, our array, its axes in one layer) of everything to be written."""
    a, b = (f".lora_embedding_{x}" if name == "embed" else f".lora_{x}.weight" for x in "AB")
    parts = [(a, adapter.a, 2), (b, adapter.b, 2)]
    if adapter.magnitude is not None:
        parts.append((".lora_magnitude_vector", adapter.magnitude, 1))
    return parts


def _check_writable(model: Decoder, found: Mapping[str, _Adapter]) -> None:
    """Raise for adapters that mean something else to PEFT."""
    if "embed" in found and model.head is None:
        raise ValueError(
            "expected no adapter on embeddings that are the head as well, got one on embed: PEFT's "
            "changes the lookup alone; merge the model"
        )
    dora = {name for name, adapter in found.items() if adapter.magnitude is not None}
    if "embed" in dora or dora not in (set(), set(found)):
        raise ValueError(
            f"expected DoRA on every adapted matrix, or on none, and not on embed, got it on "
            f"{sorted(dora)} of {sorted(found)}: PEFT has one setting for all; merge the model"
        )


def _replace(name: str, old: Any, new: Tensor | None) -> Any:
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
        "use_dora": any(adapter.magnitude is not None for adapter in modules.values()),
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
        "use_qalora": False,
        "use_bdlora": None,
        "lora_bias": False,
        "fan_in_fan_out": False,
        "layer_replication": None,
        "target_parameters": None,
        "trainable_token_indices": None,
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
    model: Decoder, tensors: Mapping[str, Tensor], names: Names, dora: bool
) -> dict[str, Tensor]:
    """The adapter's matrices as our leaves: "layers.attention.q.a" [l, in, r], ".b" [l, r, out],
    and of DoRA ".magnitude" [l, out].

    Raises: ValueError that lists keys of no weight of ours, layers left out, and uneven ranks.
    """
    matrices = {name for name in names if names[name][1]}
    if model.head is not None and not dora:
        matrices.add("embed")
    leaves = named_leaves(model, is_kind)
    shapes = {name: shape_of(x) for name, x in leaves if name in matrices}
    sources = {name: hf_names(name, names, shape) for name, shape in shapes.items()}
    where = {
        source.removesuffix(".weight"): (name, i)
        for name, all_ in sources.items()
        for i, source in enumerate(all_)
    }
    parts, problems = _by_leaf(tensors, where, dora)
    for leaf, by_layer in parts.items():
        name = leaf.rpartition(".")[0]
        lacking = sorted(set(range(len(sources[name]))) - set(by_layer))
        kinds = sorted({matrix.shape for matrix in by_layer.values()})
        if lacking:
            layers = sorted({i * shapes[name][0] // len(sources[name]) for i in lacking})
            problems.append(f"{leaf} lacks layers {layers}")
        if len(kinds) > 1:
            problems.append(f"{leaf} has several shapes {kinds}")
        lone = [x for x in ("a", "b", *["magnitude"] * dora) if f"{name}.{x}" not in parts]
        if lone:
            problems.append(f"{leaf} stands without its {' and '.join(lone)}")
    if problems or not parts:
        raise ValueError(
            f"expected an adapter of every layer of this model, got: "
            f"{'; '.join(problems[:8]) or 'no matrices'}; it belongs to another model"
        )
    out: dict[str, Tensor] = {}
    for leaf, by_layer in parts.items():
        name = leaf.rpartition(".")[0]
        lead = shapes[name][: names[name][0].count("{}")]
        each = np.stack([by_layer[i] for i in range(len(by_layer))])
        out[leaf] = each.reshape(*lead, *each.shape[1:])
    return out


def _by_leaf(
    tensors: Mapping[str, Tensor], where: Mapping[str, tuple[str, int]], dora: bool
) -> tuple[dict[str, dict[int, Tensor]], list[str]]:
    """The tensors by our leaf and place in it, given each module's weight and place; and what is
    wrong with the others.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    problems: list[str] = []
    for key in tensors:
        found = _KEY.fullmatch(key)
        name, i = where.get(text_name(found[1]), ("", 0)) if found else ("", 0)
        half = found and (found[3] if name == "embed" else found[2] or (dora and found[4]))
        if not name or not half:
            problems.append(f"unmatched key {key}")
            continue
        tensor = tensors[key]
        axes = 1 if half == "magnitude" else 2
        if tensor.ndim != axes or not jnp.issubdtype(tensor.dtype, jnp.floating):
            problems.append(f"{key} of shape {tensor.shape} and dtype {tensor.dtype}, no matrix")
            continue
        parts.setdefault(f"{name}.{half.lower()}", {})[i] = tensor.T
    return parts, problems


def _settings(
    config: Mapping[str, Any], modules: Mapping[str, list[str]]
) -> dict[str, tuple[int, float]]:
    """Rank and alpha of each of our weights; in a stack of layers they are the same in all.

    PEFT takes the first pattern that matches the end of a module's name.
    """
    ranks, alphas = (_patterns(config, f"{kind}_pattern") for kind in ("rank", "alpha"))
    rank, alpha = _number(config, "r", None), _number(config, "lora_alpha", None)
    out: dict[str, tuple[int, float]] = {}
    for name, sources in modules.items():
        found = {(_look_up(ranks, m, rank), _look_up(alphas, m, alpha)) for m in sources}
        if len(found) > 1:
            raise ValueError(
                f"expected one rank and alpha in all layers of {name}, got {sorted(found)}; "
                "merge that adapter with the library that made it, and load the merged model"
            )
        r, a = found.pop()
        if r != int(r) or r < 1:
            raise ValueError(f"expected whole ranks ≥ 1 in {CONFIG}, got {r} for {name}")
        out[name] = (int(r), a)
    return out


def _look_up(patterns: list[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), default)


def _patterns(config: Mapping[str, Any], name: str) -> list[tuple[re.Pattern[str], float]]:
    """The patterns of a setting with their values, as PEFT matches them.

    A pattern that could be matched in very many ways, and so take for ever, is an error.
    """
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"expected an object as {name} in {CONFIG}, got {found!r:.80}")
    out: list[tuple[re.Pattern[str], float]] = []
    for pattern in found:
        if _SLOW.search(pattern) or len(_REPEATS.findall(pattern)) > 4 or len(pattern) > 500:
            raise ValueError(
                f"expected simple patterns as {name} in {CONFIG}, got {pattern!r:.80}; "
                "name the modules themselves"
            )
        try:
            out.append((re.compile(rf"(.*\.)?({pattern})"), _number(found, pattern, None)))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"expected regular expressions as {name} in {CONFIG}, got {pattern!r:.80}: {error}"
            ) from error
    return out


def _number(config: Mapping[str, Any], name: str, default: float | None) -> float:
    """A finite number of the configuration."""
    value = config.get(name, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -_LARGEST < value < _LARGEST:
        raise ValueError(f"expected a number as {name!r:.80} in {CONFIG}, got {value!r:.80}")
    return float(value)


def _any_of(names: list[str]) -> str:
    """A pattern that matches these names and no others."""
    return "^(" + "|".join(map(re.escape, names)) + ")$"
