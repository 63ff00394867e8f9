"""Low-rank adapters as a transform of a model: y = xW + s·(xA)B, with B = 0 at the start.

Source: Hu et al., LoRA, 2106.09685, eq. 3; s = α/r. rsLoRA, Kalajdzievski, 2312.03732: s = α/√r.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PyTree

from .. import tree
from ..types import KeyArray

Model = TypeVar("Model")

# Every matrix of the decoder's layers; embeddings and head are left out, as is usual.
ALL_LINEAR = r"layers\.(attention\.[qkvo]|mlp\.(gate|up|down))$"


class LowRank(eqx.Module):
    """A weight W + s·A@B whose base is any other kind of weight."""

    base: Any
    a: Float[Array, "*l i r"]
    b: Float[Array, "*l r o"]
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)


def _is_weight(x: Any) -> bool:
    return isinstance(x, LowRank)


def lora_scale(rank: int, alpha: float | int, *, rank_stabilized: bool = False) -> float:
    """α/r, or α/√r when rank-stabilized."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)


def _override(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the last pattern found in the name, else the default."""
    found = [value for where, value in (pattern or {}).items() if re.search(where, name)]
    return found[-1] if found else default


def add_lora(
    model: Model,
    *,
    where: str = ALL_LINEAR,
    rank: int = 16,
    alpha: float | int = 32.0,
    key: KeyArray,
    rank_stabilized: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float | int] | None = None,
    dropout: float = 0.0,
) -> Model:
    """The model with adapters on every weight whose path the regular expression `where` finds a
    match in.

    `ranks` and `alphas` override rank and alpha by path pattern. A starts uniform in ±1/√in
    (float32), B at 0. Errors, before anything is computed: a pattern that matches nothing or
    something that is no matrix, a rank larger than the matrix, an adapter on an adapter.
    """
    found = set(tree.matching(model, where, _is_weight))
    for pattern in (*(ranks or {}), *(alphas or {})):
        if not any(re.search(pattern, name) for name in found):
            raise ValueError(
                f"pattern {pattern!r} matches none of the adapted paths: {sorted(found)}"
            )
    if not 0 <= dropout < 1:
        raise ValueError(f"expected 0 ≤ dropout < 1, got {dropout}")

    def wrap(name: str, w: Any) -> Any:
        if name not in found:
            return w
        if isinstance(w, LowRank):
            raise ValueError(f"{name} has an adapter already; merge it, or take another pattern")
        # [in, out], or [l, in, out] in a stack of layers: a norm's scale is a vector and is never
        # stacked into a matrix here.
        if not eqx.is_inexact_array(w) or w.ndim < 2 or name.endswith(("norm", "bias")):
            raise ValueError(f"expected matrices, but {where!r} matches {name}, which is none")
        *stack, i, o = w.shape
        r = _override(ranks, name, rank)
        if not 1 <= r <= min(i, o):
            raise ValueError(f"expected 1 ≤ rank ≤ {min(i, o)} for {name} [{i}, {o}], got {r}")
        bound = 1 / math.sqrt(i)
        a = jr.uniform(tree.named_key(key, name), (*stack, i, r), jnp.float32, -bound, bound)
        scale = lora_scale(r, _override(alphas, name, alpha), rank_stabilized=rank_stabilized)
        return LowRank(w, a, jnp.zeros((*stack, r, o), jnp.float32), scale, dropout)

    return tree.map_named(wrap, model, _is_weight)


def has_adapters(model: PyTree) -> bool:
    """Whether any weight of the model has an adapter."""
    return any(map(_is_weight, jax.tree.leaves(model, is_leaf=_is_weight)))


def adapters(model: PyTree) -> PyTree:
    """The filter that trains adapters only: True at every A and B, False elsewhere."""

    def mark(w: Any) -> Any:
        off = jax.tree.map(lambda _: False, w)
        return eqx.tree_at(lambda w: (w.a, w.b), off, (True, True)) if _is_weight(w) else off

    return jax.tree.map(mark, model, is_leaf=_is_weight)


def initial_adapters(model: PyTree) -> bool:
    """Whether every adapter still gives 0, B being 0. (On the host: it looks at the values.)"""
    leaves = jax.tree.leaves(model, is_leaf=_is_weight)
    return all(not jnp.any(w.b != 0) for w in leaves if isinstance(w, LowRank))


def default_trainable(model: PyTree) -> PyTree:
    """The adapters where there are some, else every float array."""
    return adapters(model) if has_adapters(model) else jax.tree.map(eqx.is_inexact_array, model)


def _replace(model: Model, f: Callable[[LowRank], Any]) -> Model:
    return jax.tree.map(lambda w: f(w) if _is_weight(w) else w, model, is_leaf=_is_weight)


def without_lora(model: Model) -> Model:
    """The base model: the same arrays, no adapters. It is the reference of a run whose adapters
    start at B = 0.
    """
    return _replace(model, lambda w: w.base)
