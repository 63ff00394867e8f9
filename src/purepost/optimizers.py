"""Around any optax optimizer: learning rates by path, and averages of the weights.

Both are optax transforms, so every algorithm takes them, their state is the optimizer's, and a
resumed run goes on with it to the bit. Schedules, here as in optax, count optimizer steps that were
taken: epochs × minibatches in a loop step, less those that were skipped.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from . import tree
from .algorithm import Models, TrainState
from .losses.limits import expect
from .types import Scalar

# optimizer steps done → a number
Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def scale_by_path(factors: Mapping[str, Scalar]) -> optax.GradientTransformation:
    """Updates times the factor of the last pattern found in a leaf's path, 1 where none is. Behind
    an optimizer, in `optax.chain`, it scales learning rates.

    Error, when the optimizer is initialised: a pattern that matches nothing.
    """
    for where, factor in factors.items():
        expect(f"factor of {where!r}", factor, 0.0, or_low=True)

    def init(params: PyTree) -> optax.EmptyState:
        for where in factors:
            tree.matching(params, where)
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None
    ) -> tuple[PyTree, optax.EmptyState]:
        def scale(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
            found = [factor for where, factor in factors.items() if re.search(where, name)]
            return x * jnp.asarray(found[-1], x.dtype) if found else x

        return tree.map_named(scale, updates), state

    return _transformation(init, update)


def lora_plus(ratio: Scalar = 16.0) -> optax.GradientTransformation:
    """The learning rate of every adapter's B `ratio` times that of A, which is the optimizer's:
    `optax.chain(optax.adamw(2e-4), lora_plus())`.

    Source: Hayou et al., LoRA+, 2402.12354, §4: η_B = λ η_A. Weight decay, where it is part of the
    optimizer's step, grows with the learning rate. Errors: ratio ≤ 0; no adapters.
    """
    expect("ratio", ratio, 0.0)
    return scale_by_path({r"\.b$": ratio})


class Averaged(NamedTuple):
    """An optimizer's state and the average of the weights that it has made, float32."""

    inner: Any
    average: PyTree
    steps: Int[Array, ""]  # that the optimizer has taken


def averaged(
    optimizer: optax.GradientTransformation, decay: Scalar | Schedule = 0.999
) -> optax.GradientTransformation:
    """The optimizer, and beside it the average θ̄ ← d·θ̄ + (1 − d)·θ after every step it takes,
    which `average_of` gives to evaluate. Training itself is as without.

    A number is an exponential moving average from the initial weights on; `polyak()` is the plain
    mean. It is to be the outermost transform. Adapters are averaged factor by factor.
    """
    if not callable(decay):
        expect("decay", decay, 0.0, 1.0, or_low=True)

    def init(params: PyTree) -> Averaged:
        full = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
        return Averaged(optimizer.init(params), full, jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: Averaged, params: PyTree = None) -> tuple[PyTree, Averaged]:
        updates, inner = optimizer.update(updates, state.inner, params)
        new = optax.apply_updates(params, updates)
        d = decay(state.steps) if callable(decay) else decay
        average = jax.tree.map(lambda a, x: d * a + (1 - d) * x, state.average, new)
        return updates, Averaged(inner, average, state.steps + 1)

    return _transformation(init, update)


def polyak(start: int = 0) -> Schedule:
    """The decay that makes `averaged` the mean of all weights from optimizer step `start` + 1 on,
    and before it the weights as they are.

    Source: Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992, eq. 2.
    """
    if start < 0:
        raise ValueError(f"expected start ≥ 0 optimizer steps, got {start}")

    def decay(count: Int[Array, ""]) -> Float[Array, ""]:
        before = jnp.maximum(count - start, 0).astype(jnp.float32)
        return before / (before + 1)

    return decay


def average_of(state: TrainState[Models]) -> Models:
    """The models with averaged weights in place of those that train, in their own dtype.

    Error: an optimizer that is not `averaged`.
    """
    is_average = lambda x: isinstance(x, Averaged)  # noqa: E731
    leaves = jax.tree.leaves(state.opt_state.inner, is_leaf=is_average)
    found = [x for x in leaves if is_average(x)]
    if len(found) != 1:
        raise ValueError(
            f"expected an optimizer with one average, got {len(found)}; wrap it in `averaged`"
        )
    average = jax.device_put(found[0].average, jax.memory.Space.Device)
    params = jax.tree.map(lambda a, x: a.astype(x.dtype), average, state.params)
    return eqx.combine(params, state.frozen)


def _transformation(
    init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformation:
    """Both as optax has them, whose types of trees are its own."""
    return optax.GradientTransformation(init, update)
