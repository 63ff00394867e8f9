"""Paths of a pytree's leaves as names, strided splits, and counts."""

import re
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .types import KeyArray, num_rows

T = TypeVar("T")


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's path as "layers.attention.q": attributes, keys and indices joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf, in tree order."""
    return [
        (path_name(p), x) for p, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    ]


def map_named(
    f: Callable[[str, Any], Any], tree: T, is_leaf: Callable[[Any], bool] | None = None
) -> T:
    """`jax.tree.map` whose function is also told the leaf's name."""
    return jax.tree_util.tree_map_with_path(lambda p, x: f(path_name(p), x), tree, is_leaf=is_leaf)


def matching(tree: PyTree, where: str, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The names that the regular expression `where` finds a match in.

    None at all is an error that lists the names.
    """
    names = [name for name, _ in named_leaves(tree, is_leaf)]
    found = [name for name in names if re.search(where, name)]
    if not found:
        raise ValueError(
            f"expected a pattern that matches some path, got where={where!r}, "
            "which matches none of: " + ", ".join(names)
        )
    return found


def named_key(key: KeyArray, name: str) -> KeyArray:
    """The key that belongs to a path: the same whatever else the tree holds."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def split_rows(batch: T, parts: int) -> T:
    """[b, ...] → [parts, b/parts, ...], part m taking the rows m, m+parts, …: no row leaves its
    shard.
    """
    b = num_rows(batch)
    if b % parts:
        raise ValueError(f"batch of {b} rows is not divisible into {parts} parts; pad it first")
    return jax.tree.map(lambda x: x.reshape(b // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def pad_rows(batch: T, multiple: int) -> T:
    """Rows of zeros appended until `multiple` divides their number.

    In every batch a zero row has weight 0.
    """
    missing = -num_rows(batch) % multiple
    if not missing:
        return batch
    return jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), batch)


def count(tree: PyTree) -> int:
    """The number of numbers in the arrays of a tree."""
    return sum(x.size for x in jax.tree.leaves(tree) if eqx.is_array(x))


def copy(tree: T) -> T:
    """Every array copied into a buffer of its own."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, Array) else x, tree)
