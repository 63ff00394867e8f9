"""The manifest of a run: everything that tells it from another, as JSON beside its checkpoints."""

import dataclasses
import inspect
import json
import platform
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

FILE = "manifest.json"
PACKAGES = ("purepost", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint")
# What must be the same for a run to go on as the same run; the rest is only recorded.
BINDING = ("config", "seed", "data_hash")


@dataclass(frozen=True)
class Manifest:
    """What a run is, and where and with what it ran."""

    config: dict[str, Any]
    seed: int  # of the root key: no key is stored
    data_hash: str
    versions: dict[str, str]
    device: dict[str, Any]
    git: dict[str, Any] | None  # revision, and dirty: whether the files differ from it
    time: str  # ISO 8601, UTC


def make_manifest(
    config: Any, *, seed: int, data_hash: str, source: str | Path | None = None
) -> Manifest:
    """The manifest of a run that starts here and now.

    `config` is a dataclass or a mapping; `source` is the experiment's file or directory, whose git
    revision is recorded (the working directory by default).
    """
    if isinstance(config, type) or not (dataclasses.is_dataclass(config) or _is_mapping(config)):
        raise TypeError(f"expected config to be a dataclass or a mapping, got {config!r}")
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    devices = jax.devices()
    return Manifest(
        config=_plain(config),
        seed=seed,
        data_hash=data_hash,
        versions=versions,
        device={"kind": devices[0].device_kind, "count": len(devices)},
        git=_git(Path.cwd() if source is None else Path(source)),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def differences(old: Mapping[str, Any], new: Manifest) -> dict[str, str]:
    """Dotted name → "… then, … now" where config, seed or data differ from a stored manifest's."""
    then = _flat({key: old.get(key) for key in BINDING})
    now = _flat({key: value for key, value in _plain(new).items() if key in BINDING})
    absent = "nothing"
    return {
        name: f"{then.get(name, absent)} then, {now.get(name, absent)} now"
        for name in dict.fromkeys([*then, *now])
        if then.get(name, absent) != now.get(name, absent)
    }


def check_manifest(directory: Path, manifest: Manifest, allow: Collection[str]) -> None:
    """Raise ValueError, listing the differences, if the directory holds another run.

    `allow` names what may differ: "config.steps", or "config" for all of it.
    """
    path = directory / FILE
    if not path.exists():
        return
    content = _read(path)
    latest = [content, *content.get("resumed", [])][-1]
    found = {
        name: words
        for name, words in differences(latest, manifest).items()
        if not any(f"{name}.".startswith(f"{allowed}.") for allowed in allow)
    }
    if found:
        listed = "; ".join(f"{name}: {words}" for name, words in found.items())
        raise ValueError(
            f"expected the run in {directory} to go on as it began, got {listed}; take another "
            f"directory, or name what may differ: allow={sorted(found)}"
        )


def record(directory: Path, manifest: Manifest, step: int) -> None:
    """Write the manifest; a run that resumes after `step` is added to the one that is there."""
    if jax.process_index() != 0:
        return
    path = directory / FILE
    now = _plain(manifest)
    content = now | {"resumed": []}
    if step > 0 and path.exists():
        content = _read(path)
        content["resumed"] = [*content.get("resumed", []), {"step": step} | now]
    temporary = path.with_name(FILE + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON in {path}, got: {error}; repair or remove it") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {path}, got {content!r:.80}")
    return content


def _is_mapping(x: Any) -> bool:
    return isinstance(x, Mapping)


def _plain(x: Any) -> Any:
    """A value as JSON holds it: dataclasses become objects, functions their names."""
    match x:
        case None | bool() | int() | float() | str():
            return x
        case _ if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return {f.name: _plain(x.__dict__[f.name]) for f in dataclasses.fields(x)}
        case Mapping():
            return {str(key): _plain(value) for key, value in x.items()}
        case list() | tuple():
            return [_plain(value) for value in x]
        case set() | frozenset():
            return sorted(map(_plain, x), key=str)
        case _ if inspect.isroutine(x) or isinstance(x, type):
            return f"{x.__module__}.{x.__qualname__}"
    return str(x)


def _flat(x: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(x, dict) or not x:
        return {prefix: x}
    parts: dict[str, Any] = {}
    for key, value in x.items():
        parts |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return parts


def _git(source: Path) -> dict[str, Any] | None:
    """The revision checked out where the experiment lies; None if it is no git checkout."""
    directory = source if source.is_dir() else source.parent

    def ask(*command: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *command],
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain")
    return None if revision is None else {"revision": revision, "dirty": bool(changes)}
