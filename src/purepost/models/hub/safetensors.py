"""Checkpoints in Hugging Face layout: config.json beside one safetensors file, or several and an
index of them.

Tensors are read when asked for, each in the dtype it has on disk.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from .documents import parse_object, read_object, write_object

Tensor = Shaped[np.ndarray, "..."]

_TYPES = "F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split()
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


class Tensors(Mapping[str, Tensor]):
    """The tensors of some safetensors files by name, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: in which file each name stands."""
        self._files = dict(files)
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """The configuration and the tensors of a checkpoint in Hugging Face layout.

    Raises: FileNotFoundError when a file is missing, also one that the index names; ValueError for
    files that are damaged, and when one lacks a tensor that the index puts there. Files that the
    index does not name are ignored.
    """
    config_path, single, index = (directory / name for name in (CONFIG, SINGLE, INDEX))
    if not config_path.is_file():
        raise FileNotFoundError(f"expected {config_path}, found none; name a model's directory")
    config = read_object(config_path)
    if single.is_file():
        return config, read_file(single)
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir())
        raise FileNotFoundError(
            f"expected {SINGLE} or {INDEX} in {directory}, found {found}; "
            "save the weights as safetensors first"
        )
    files = _read_index(index)
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise FileNotFoundError(f"expected {path}, which {INDEX} names, found none; fetch it")
        lacking = {name for name, file in files.items() if file == path} - set(_open(path).keys())
        if lacking:
            raise ValueError(
                f"expected {path} to hold {sorted(lacking)[:8]}, as {INDEX} says, got none of that "
                "name; fetch the checkpoint again"
            )
    return config, Tensors(files)


def read_file(path: Path) -> Tensors:
    """The tensors of one safetensors file."""
    return Tensors(dict.fromkeys(_open(path).keys(), path))


def _read_index(path: Path) -> dict[str, Path]:
    """In which file beside the index each tensor stands; a file elsewhere is an error."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"expected an object weight_map in {path}, got {files!r:.80}; fetch it")
    for name, file in files.items():
        plain = isinstance(file, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", file)
        if not plain:
            raise ValueError(
                f"expected the name of a .safetensors file beside {path} for {name}, "
                f"got {file!r:.80}; the index is damaged, or meant to lead elsewhere: do not use it"
            )
    return {name: path.parent / file for name, file in files.items()}


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5 * 2**30,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint in Hugging Face layout, wholly or not at all.

    `also(path)` may write more files beside it. Raises: ValueError when something is there already.
    """

    def write(path: Path) -> None:
        write_object(path / CONFIG, config)
        _write_shards(path, tensors, max_shard_bytes)
        if also is not None:
            also(path)

    write_directory(directory, write)


def write_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Make a directory of what `write(path)` writes, in one step at the end.

    Raises: ValueError when the directory exists and is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(
            f"expected nothing at {directory}, got something; remove it or choose another place"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        temporary.chmod(0o755)
        write(temporary)
        temporary.replace(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; arrays in any memory order keep their values."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, str(path), metadata={"format": "pt"})


def _write_shards(path: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """One file, or as many as the size asks for and their index."""
    shards: list[list[str]] = [[]]
    total = size = 0
    for name in tensors:
        bytes_ = tensors[name].nbytes
        if shards[-1] and size + bytes_ > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + bytes_, total + bytes_
    if len(shards) == 1:
        save_tensors(path / SINGLE, tensors)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(path / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_object(path / INDEX, index)


def _open(path: Path) -> Any:
    """A reader of one file.

    Raises: ValueError when it is no safetensors file, ends early, names a tensor twice, or has one
    of a type that NumPy lacks.
    """
    from safetensors import SafetensorError, safe_open

    try:
        reader = safe_open(str(path), framework="numpy")
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(
            f"expected a safetensors file at {path}, got {error}; fetch it again"
        ) from error
    with path.open("rb") as file:  # the reader has checked the length, and takes the last of two
        length = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(length), f"the header of {path}")
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] not in _TYPES:
            raise ValueError(
                f"expected {name} in {path} of a type among {', '.join(_TYPES)}, got "
                f"{entry['dtype']}; save it in another precision"
            )
    return reader
