"""Adapters apart from their base: which leaves train, taking them off and putting them on, and
their arithmetic.

Several adapters share one base: `with_adapter(base, adapters["critic"])` holds the same arrays as
`with_adapter(base, adapters["policy"])`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import tree
from .lora import LowRank, Merged, is_adapted, is_kind
from .quantized import Quantized

Model = TypeVar("Model")

Adapter = dict[str, LowRank]  # by the weight's path; the bases are None
Filter = Callable[[Any], PyTree]


def has_adapters(model: PyTree) -> bool:
    """Whether any weight of the model has an adapter."""
    return any(map(is_adapted, jax.tree.leaves(model, is_leaf=is_kind)))


def adapters(model: PyTree) -> PyTree:
    """The filter that trains adapters only: True at every A, B and magnitude, False elsewhere."""

    def mark(w: Any) -> Any:
        off = jax.tree.map(lambda _: False, w)
        if not isinstance(w, LowRank):
            return off
        trained = lambda w: [x for x in (w.a, w.b, w.magnitude) if x is not None]  # noqa: E731
        return eqx.tree_at(trained, off, replace_fn=lambda _: True)

    return jax.tree.map(mark, model, is_leaf=is_kind)


def default_trainable(model: PyTree) -> PyTree:
    """The adapters where there are some, else every float array that is not quantised."""
    if has_adapters(model):
        return adapters(model)

    def mark(w: Any) -> Any:
        raw = not isinstance(w, Quantized | Merged)
        return jax.tree.map(lambda x: raw and eqx.is_inexact_array(x), w)

    return jax.tree.map(mark, model, is_leaf=is_kind)


def train_only(where: str) -> Filter:
    """The filter that trains, of what would train by default, what the regular expression finds a
    match in the path of. Error, when it is used: it matches nothing of that.
    """
    return lambda model: _narrowed(model, where, matched=True)


def freeze(where: str) -> Filter:
    """The filter that trains what would train by default but for the paths that the regular
    expression finds a match in. Error, when it is used: it matches nothing of that.
    """
    return lambda model: _narrowed(model, where, matched=False)


def _narrowed(model: PyTree, where: str, *, matched: bool) -> PyTree:
    usual = default_trainable(model)
    names = [name for name, on in tree.named_leaves(usual) if on]
    found = {name for name in names if re.search(where, name)}
    if not found:
        raise ValueError(
            f"expected a pattern that matches something that trains, got where={where!r}, which "
            f"matches none of: {', '.join(names)}"
        )
    return tree.map_named(lambda name, on: on and (name in found) == matched, usual)


def initial_adapters(model: PyTree) -> bool:
    """Whether every adapter still gives 0: B is 0, and no magnitude was learnt. (On the host: it
    looks at the values.)
    """
    leaves = jax.tree.leaves(model, is_leaf=is_kind)
    return all(
        w.magnitude is None and not jnp.any(w.b != 0) for w in leaves if isinstance(w, LowRank)
    )


def without_lora(model: Model) -> Model:
    """The base model: the same arrays, no adapters. It is the reference of a run whose adapters
    start at B = 0.
    """
    return _replace(model, lambda name, w: w.base)


def adapter_of(model: PyTree) -> Adapter:
    """The model's adapters by path, off their bases. Error: it has none."""
    found = {
        name: replace(w, base=None)
        for name, w in tree.named_leaves(model, is_kind)
        if isinstance(w, LowRank)
    }
    if not found:
        raise ValueError("expected a model with adapters, got none; add_lora makes some")
    return found


def with_adapter(model: Model, adapter: Adapter) -> Model:
    """The model with this adapter in place of its own, if any. Errors: a path the model lacks, a
    matrix of another shape.
    """
    bare = without_lora(model)
    weights = dict(tree.named_leaves(bare, is_kind))
    for name, w in adapter.items():
        if name not in weights:
            raise ValueError(
                f"expected paths of the model, got {name}, which is none of: {', '.join(weights)}"
            )
        expected = (*w.a.shape[:-1], w.b.shape[-1])
        if weights[name].shape != expected:
            raise ValueError(
                f"expected an adapter of {name} {list(weights[name].shape)}, got one of "
                f"{list(expected)}; it belongs to another model"
            )

    def put(name: str, w: Any) -> Any:
        return replace(adapter[name], base=w) if name in adapter else w

    return tree.map_named(put, bare, is_kind)


def scale_adapter(adapter: Adapter, factor: float | int) -> Adapter:
    """The adapter whose every ΔW is `factor` times this one's."""
    _check_plain(adapter)
    return {name: replace(w, scale=w.scale * factor) for name, w in adapter.items()}


def add_adapters(one: Adapter, two: Adapter) -> Adapter:
    """The adapter whose ΔW is the sum of the two: their ranks add up, and nothing is rounded off.

    A PiSSA adapter against the weights that it began with: trained − initial.
    """
    _check_plain(one)
    _check_plain(two)

    def both(name: str) -> LowRank:
        if name not in one or name not in two:
            return one.get(name) or two[name]
        u, v = one[name], two[name]
        # The ranks share one scale: the second's B takes up what it differs by.
        scale = u.scale or 1.0
        b = [u.b * (u.scale / scale), v.b * (v.scale / scale)]
        a = jnp.concatenate([u.a, v.a], -1)
        dropout = max(u.dropout, v.dropout)
        return LowRank(None, a, jnp.concatenate(b, -2), scale, dropout)

    return {name: both(name) for name in one | two}


def interpolate_adapters(one: Adapter, two: Adapter, share: float | int) -> Adapter:
    """(1 − share) · the first's ΔW + share · the second's."""
    return add_adapters(scale_adapter(one, 1 - share), scale_adapter(two, share))


def _check_plain(adapter: Adapter) -> None:
    for name, w in adapter.items():
        if w.magnitude is not None:
            raise ValueError(
                f"expected adapters that add to their weights, got DoRA's on {name}, which scales "
                "them; merge it, and take the difference of the weights"
            )


def _replace(model: Model, f: Callable[[str, LowRank], Any]) -> Model:
    return tree.map_named(
        lambda name, w: f(name, w) if isinstance(w, LowRank) else w, model, is_kind
    )
