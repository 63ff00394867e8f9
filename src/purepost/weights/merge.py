"""Adapters folded into their base weights, and taken out again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .adapters import adapter_of, has_adapters, with_adapter
from .linear import dense
from .lora import LowRank, Merged, is_kind
from .quantized import Quantized

Model = TypeVar("Model")


def merge(model: Model, *, onto: Model | None = None, keep: bool = False) -> Model:
    """The model with W + s·A@B in place of every adapted weight, in the base's dtype: for export
    and for sampling. A quantised base counts as the numbers that it stands for.

    `onto`: the adapters are merged into this model's weights instead, such as those before they
    were quantised. `keep`: base and adapter stay beside what they make, for `unmerge`.
    """
    if onto is not None and has_adapters(model):
        model = with_adapter(onto, adapter_of(model))
    if keep:
        return _replace(model, lambda w: Merged(dense(w), w) if isinstance(w, LowRank) else w)
    return _replace(model, lambda w: dense(w) if isinstance(w, LowRank | Merged) else w)


def unmerge(model: Model) -> Model:
    """What `merge(model, keep=True)` was given, to the bit."""
    return _replace(model, lambda w: w.parts if isinstance(w, Merged) else w)


def for_sampling(model: Model) -> Model:
    """The model with its adapters merged, but for those on quantised bases, whose dense weights
    would take the memory that was saved.
    """

    def ready(w: Any) -> Any:
        quantized = isinstance(w, LowRank) and isinstance(w.base, Quantized)
        return dense(w) if isinstance(w, LowRank | Merged) and not quantized else w

    return _replace(model, ready)


def _replace(model: Model, f: Callable[[Any], Any]) -> Model:
    return jax.tree.map(f, model, is_leaf=is_kind)


def cast_weights(model: Model, dtype: DTypeLike) -> Model:
    """The model with its float weights in `dtype`; quantised ones are read as such, adapters are
    float32.
    """

    def change(w: Any) -> Any:
        match w:
            case LowRank():
                own = (w.a, w.b, w.magnitude)
                a, b, magnitude = (x if x is None else x.astype(jnp.float32) for x in own)
                return replace(w, base=change(w.base), a=a, b=b, magnitude=magnitude)
            case Quantized():
                return replace(w, dtype=jnp.dtype(dtype))
            case Merged():
                return Merged(w.value.astype(dtype), change(w.parts))
        return w.astype(dtype) if eqx.is_inexact_array(w) else w

    return _replace(model, change)
