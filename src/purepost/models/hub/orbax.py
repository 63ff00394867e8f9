"""Model directories by Orbax: config.json and the tokenizer as in Hugging Face layout, and beside
them the weights by our own names, in our own shapes: one array for all layers.

They are read and written in parallel and in parts, so they suit large models that stay in JAX.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ...tree import named_leaves
from ...weights import is_kind
from ..decoder import Decoder
from .convert import Tensor
from .documents import read_object
from .safetensors import CONFIG

WEIGHTS = "orbax"  # the folder inside the directory


class OrbaxLeaves(Mapping[str, Tensor]):
    """The leaves of a saved model by name, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        import orbax.checkpoint as ocp

        self._path = path.absolute()
        self._reader = ocp.PyTreeCheckpointer()
        try:
            found: Any = self._reader.metadata(self._path).item_metadata
            self._shapes = dict(found.tree)
        except Exception as error:  # what Orbax raises depends on which of its files is damaged
            raise _damaged(path, error) from error

    def __getitem__(self, name: str) -> Tensor:
        import orbax.checkpoint as ocp

        kind = self._shapes[name]
        args = ocp.args.PyTreeRestore(
            item={name: jax.ShapeDtypeStruct(kind.shape, kind.dtype)},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            return self._reader.restore(self._path, args=args)[name]
        except Exception as error:
            raise _damaged(self._path, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def is_orbax(directory: Path) -> bool:
    """Whether the directory is one of these."""
    return (directory / WEIGHTS).is_dir()


def read_orbax(directory: Path) -> tuple[dict[str, Any], OrbaxLeaves]:
    """The configuration and the leaves of such a directory.

    Raises: FileNotFoundError without config.json; ValueError for damaged files.
    """
    if not (directory / CONFIG).is_file():
        raise FileNotFoundError(f"expected {directory / CONFIG}, found none; save the model again")
    return read_object(directory / CONFIG), OrbaxLeaves(directory / WEIGHTS)


def write_leaves(model: Decoder, directory: Path) -> None:
    """Write a model's arrays into the directory. Raises: ValueError for other weights."""
    import orbax.checkpoint as ocp

    for name, leaf in named_leaves(model, is_kind):
        if is_kind(leaf):
            raise ValueError(
                f"expected only plain weights, got {name}; merge and dequantize the model first"
            )
    leaves = dict(named_leaves(eqx.filter(model, eqx.is_array)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / WEIGHTS).absolute(), leaves)


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"expected an Orbax checkpoint at {path}, got {type(error).__name__}: {error}; "
        "save the model again"
    )
