"""The gradient of a sum over parts, with room for one gradient.

A gradient of stacked layers is made by a scan that goes through them backwards. Where it is made in
a buffer of its own and then added to the sum, there are two of the size of the model. Here each
layer's gradient is added to the sum where that lies, by JAX's mutable references; to the bit it is
the same sum.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Float, PyTree

try:  # private: elsewhere in a JAX to come, and then there are two gradients as everywhere
    from jax._src.state.discharge import discharge_state
except ImportError:
    discharge_state = None

T = TypeVar("T")
Aux = TypeVar("Aux")
Params = TypeVar("Params")
Part = TypeVar("Part")


def accumulate(
    objective: Callable[[Params, Part], tuple[Float[Array, ""], Aux]], params: Params, parts: PyTree
) -> tuple[Aux, Params]:
    """Σ of what `objective` gives beside its value, and of its gradient (float32), over the parts,
    which lie on the leading axis of `parts`.
    """
    if discharge_state is None:
        return _apart(objective, params, parts)
    first = jax.tree.map(lambda x: x[0], parts)
    in_place: list[bool] = []

    def beside(params: Params, part: Part) -> Aux:
        pull: Any
        _, pull, aux = jax.vjp(lambda p: objective(p, part), params, has_aux=True)
        in_place.extend(_scanned(pull.jaxpr))
        return aux

    zero = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(beside, params, first)
    )
    leaves, structure = jax.tree.flatten(params)
    in_place = [x and p.dtype == jnp.float32 for x, p in zip(in_place, leaves, strict=True)]

    def whole(params: Params) -> tuple[Aux, Params]:
        sums = [jax.new_ref(jnp.zeros(p.shape)) for p in leaves]
        apart = jax.ad.GradValue()  # pyright: ignore[reportPrivateImportUsage]
        places = [s if x else apart for s, x in zip(sums, in_place, strict=True)]

        def body(total: Aux, part: Part) -> tuple[Aux, None]:
            pull: Any
            value, pull, aux = jax.vjp(lambda p: objective(p, part), params, has_aux=True)
            (grads,) = pull.with_refs(structure.unflatten(places))(jnp.ones_like(value))
            for s, x, grad in zip(sums, in_place, structure.flatten_up_to(grads), strict=True):
                if not x:
                    s[...] += grad.astype(jnp.float32)
            return jax.tree.map(jnp.add, total, aux), None

        total, _ = jax.lax.scan(body, zero, parts)
        return total, structure.unflatten([s[...] for s in sums])

    return _without_references(whole, params)


def _apart(
    objective: Callable[[Params, Part], tuple[Float[Array, ""], Aux]], params: Params, parts: PyTree
) -> tuple[Aux, Params]:
    """The same sum of gradients, each made in a buffer of its own."""

    def gradient(part: Part) -> tuple[Aux, Params]:
        grads, aux = jax.grad(objective, has_aux=True)(params, part)
        return aux, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def body(total: PyTree, part: Part) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, gradient(part)), None

    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], parts))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zero, parts)[0]


def _scanned(jaxpr: Jaxpr) -> list[bool]:
    """Of the inputs of a linear program, which are read by a scan and by nothing else."""
    readers: dict[Any, list[str]] = {x: [] for x in jaxpr.invars}
    for equation in jaxpr.eqns:
        for x in equation.invars:
            if not isinstance(x, Literal) and x in readers:
                readers[x].append(equation.primitive.name)
    return [names == ["scan"] for names in readers.values()]


def _without_references(function: Callable[[Params], T], params: Params) -> T:
    """What a function gives that makes references and keeps them to itself, by the pure program
    that XLA is given of it anyway: vmap does not know scans over references.
    """
    assert discharge_state is not None
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(params)
    out = jaxpr_as_fun(discharge_state(jaxpr))(*jax.tree.leaves(params))
    return jax.tree.unflatten(jax.tree.structure(shapes), out)
