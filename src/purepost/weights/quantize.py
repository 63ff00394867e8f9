"""Weights in few bits as a transform of a model, for training adapters on them: QLoRA is
`add_lora(quantize(model))`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import tree
from .lora import ALL_LINEAR, LowRank, check_matrix, is_kind, values_of
from .quantized import Kind, Quantized, nf4

Model = TypeVar("Model")


def quantize(
    model: Model, *, where: str = ALL_LINEAR, kind: Kind = nf4, block: int | None = None
) -> Model:
    """The model with the weights in few bits whose path the regular expression `where` finds a
    match in; under an adapter, its base.

    `kind` is `nf4`, `int4`, `int8`, `fp8`, or any function like them; `block` is in inputs, None
    for the kind's usual. Quantised weights do not train. Errors name the path: a pattern that
    matches nothing or something that is no matrix, weights that are quantised or not finite, a
    block that does not divide.
    """
    found = set(tree.matching(model, where, is_kind))
    bases = [(n, _base(w)) for n, w in tree.named_leaves(model, is_kind) if n in found]
    for name, w in bases:
        if isinstance(w, Quantized):
            raise ValueError(f"{name} is quantised already; dequantize it, or take another pattern")
        check_matrix(name, w, where)
        try:
            made = jax.eval_shape(lambda x: kind(x, block), w)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if not isinstance(made, Quantized):
            raise ValueError(f"expected a kind that quantises {name}, got {kind}; nf4 is one")

    def encode(name: str, w: Any) -> Any:
        if name not in found:
            return w
        if isinstance(w, LowRank):
            return replace(w, base=encode(name, w.base))
        made, finite = _quantized(w, kind, block)
        if not finite:
            raise ValueError(
                f"expected finite weights in {name}, got some that are not, or are not once they "
                "are quantised; load the model again"
            )
        return made

    return tree.map_named(encode, model, is_kind)


def dequantize(model: Model) -> Model:
    """The model with the numbers that its quantised weights stand for in their place."""

    def dense(w: Any) -> Any:
        if isinstance(w, LowRank):
            return replace(w, base=dense(w.base))
        return w.dense() if isinstance(w, Quantized) else w

    return jax.tree.map(dense, model, is_leaf=is_kind)


def quantization_errors(model: PyTree, quantized: PyTree) -> dict[str, Float[Array, "*l"]]:
    """‖Q(W) − W‖ / ‖W‖ of every quantised weight by its path, of each layer in a stack.

    A function of its own and no option of `quantize`, whose result is a model and nothing else.
    """
    before = {name: _base(w) for name, w in tree.named_leaves(model, is_kind)}
    after = {name: _base(w) for name, w in tree.named_leaves(quantized, is_kind)}
    return {name: _error(before[name], w) for name, w in after.items() if isinstance(w, Quantized)}


def _base(w: Any) -> Any:
    return w.base if isinstance(w, LowRank) else w


@jax.jit
def _error(w: Float[Array, "*l i o"] | Quantized, q: Quantized) -> Float[Array, "*l"]:
    dense = values_of(w)
    norm = jnp.sqrt((dense**2).sum((-2, -1)))
    return jnp.sqrt(((values_of(q) - dense) ** 2).sum((-2, -1))) / jnp.where(norm > 0, norm, 1)


@partial(jax.jit, static_argnums=(1, 2))
def _quantized(w: Float[Array, "*l i o"], kind: Kind, block: int | None) -> tuple[Quantized, Array]:
    """The weight quantised, a matrix of the stack at a time, and whether all of it is finite."""

    def one(x: Float[Array, "i o"]) -> tuple[Quantized, Array]:
        made = kind(x, block)
        return made, jnp.isfinite(x).all() & jnp.isfinite(values_of(made)).all()

    flat = w.reshape(-1, *w.shape[-2:])
    made, finite = jax.lax.map(one, flat)
    stacked = jax.tree.map(lambda x: x.reshape(*w.shape[:-2], *x.shape[1:]), made)
    return stacked, finite.all()
