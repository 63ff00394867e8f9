"""Adapters folded into their base weights."""

from typing import TypeVar

import jax

from .linear import dense
from .lora import LowRank

Model = TypeVar("Model")


def merge(model: Model) -> Model:
    """The model with W + s·A@B in place of every adapted weight, in the base's dtype: for export
    and for sampling.
    """
    is_adapted = lambda w: isinstance(w, LowRank)  # noqa: E731
    return jax.tree.map(lambda w: dense(w) if is_adapted(w) else w, model, is_leaf=is_adapted)
