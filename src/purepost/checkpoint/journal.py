"""What collectors brought, step by step, on disk: a run that was killed and resumed trains on the
same episodes, though they depended on time, and goes on with what was under way.
"""

import importlib
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ..mean import Metrics
from ..models.decoder import Decoder
from ..rollout.collect import Collect, Episodes, Tasks
from ..rollout.stateful import StatefulCollect
from ..types import KeyArray

ENTRY = re.compile(r"(\d{8})-([0-9a-f]+)\.npz")
TREE = "tree"


def journaled(collect: StatefulCollect[Any], directory: str | Path, *, keep: int = 100) -> Collect:
    """A collector whose every step is written down before anybody trains on it: the episodes, and
    what is carried on. A step that stands there is read instead.

    Steps are told by their keys. The last `keep` stay: more than a run can fall back when it is
    resumed from its last checkpoint. A directory is for one run. Errors: steps that are not in the
    journal's order; what is carried is neither plain data nor arrays.
    """
    if keep < 1:
        raise ValueError(f"expected keep ≥ 1, got {keep}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    place: int | None = None  # the entry of the last step
    carried: Any = None

    def collected(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        nonlocal place, carried
        entries = _entries(folder)
        name = np.asarray(jr.key_data(key)).tobytes().hex()
        last = max(entries, default=-1)
        number = {of: number for number, (of, _) in entries.items()}.get(name)
        if place is not None and (last if number is None else number - 1) != place:
            raise ValueError(
                f"expected the step after number {place} of the journal in {folder}, got number "
                f"{last + 1 if number is None else number}; give every run a directory of its own"
            )
        if number is not None:
            episodes, metrics, carried = decode(entries[number][1].read_bytes())
            place = number
            return episodes, metrics
        if place is None:
            carried = collect.start() if last < 0 else decode(entries[last][1].read_bytes())[2]
        episodes, metrics, carried = collect(key, model, tasks, carried)
        place = last + 1
        _write(folder / f"{place:08d}-{name}.npz", encode((episodes, metrics, carried)))
        for old in sorted(entries)[: max(0, len(entries) + 1 - keep)]:
            entries[old][1].unlink()
        return episodes, metrics

    return collected


def _entries(folder: Path) -> dict[int, tuple[str, Path]]:
    """By number: the step's key and the file."""
    found = {path: ENTRY.fullmatch(path.name) for path in folder.iterdir()}
    return {int(m[1]): (m[2], path) for path, m in found.items() if m is not None}


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def encode(value: Any) -> bytes:
    """Plain data, arrays and purepost's dataclasses as an .npz file. Error: anything else."""
    arrays: dict[str, np.ndarray] = {}

    def plain(x: Any) -> Any:
        match x:
            case None | bool() | int() | float() | str():
                return x
            case jax.Array() | np.ndarray() | np.generic() if x.dtype != object:
                name = f"{'jax' if isinstance(x, jax.Array) else 'numpy'}{len(arrays)}"
                arrays[name] = np.asarray(x)
                return {"array": name}
            case dict() if all(isinstance(k, str) for k in x):
                return {"dict": {k: plain(v) for k, v in x.items()}}
            case list() | tuple():
                return {type(x).__name__: [plain(v) for v in x]}
        kind = type(x)
        if not (is_dataclass(x) and kind.__module__.startswith("purepost.")):
            raise TypeError(f"expected plain data or arrays in a journal, got {x!r:.80}")
        values = {field.name: plain(vars(x)[field.name]) for field in fields(x)}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": values}

    tree = json.dumps(plain(value)).encode()
    file = io.BytesIO()
    arrays[TREE] = np.frombuffer(tree, np.uint8)
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def decode(content: bytes) -> Any:
    """What `encode` was given."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)

    def value(x: Any) -> Any:
        if not isinstance(x, dict):
            return x
        match next(iter(x.items())):
            case "array", name:
                return jnp.asarray(arrays[name]) if name.startswith("jax") else arrays[name]
            case "dict", items:
                return {k: value(v) for k, v in items.items()}
            case "list", items:
                return [value(v) for v in items]
            case "tuple", items:
                return tuple(value(v) for v in items)
        return _class(x["class"])(**{k: value(v) for k, v in x["fields"].items()})

    return value(json.loads(arrays[TREE].tobytes()))


def _class(name: str) -> Callable[..., Any]:
    """A dataclass of this package."""
    module, _, kind = name.partition(":")
    found = vars(importlib.import_module(module))[kind] if module.startswith("purepost.") else None
    if not is_dataclass(found) or not isinstance(found, type):
        raise ValueError(f"expected the name of a dataclass of purepost, got {name}")
    return found
