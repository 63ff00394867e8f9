"""The generic loop: `train` runs any algorithm, `fuse` makes one program of a whole step.

Keys are arithmetic: step s uses `fold_in(root, s)`, split once. No key and no position in the
data is stored, so a run that is resumed from any step is, to the bit, the run that was never
stopped.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.core import Tracer
from jax.sharding import NamedSharding

from . import tree
from .algorithm import Algorithm, Batch, Data, Models, TrainState, combine_metrics
from .mean import Metrics
from .types import KeyArray

T = TypeVar("T")

AHEAD = 2  # steps that the host may have handed over and the device not yet done


def _placement(x: Any) -> tuple[NamedSharding | None, ...]:
    """The shardings of a tree's arrays, hashable; None where an array lies on one device or is
    being traced.
    """
    return tuple(
        leaf.sharding
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and isinstance(leaf.sharding, NamedSharding)
        else None
        for leaf in jax.tree.leaves(x)
    )


def _keep_placement(x: T, placement: tuple[NamedSharding | None, ...]) -> T:
    """Constrain arrays to the shardings that they came with."""
    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(
        structure,
        [
            leaf if s is None else jax.lax.with_sharding_constraint(leaf, s)
            for leaf, s in zip(leaves, placement, strict=True)
        ],
    )


def _donating(function: Callable[..., tuple[TrainState, Metrics]]) -> Callable[..., Any]:
    """`function(fixed, key, state, x)` jitted, its parameters and optimizer state updated in
    place.
    """

    @eqx.filter_jit(donate="all-except-first")
    def jitted(fixed: Any, donated: Any) -> tuple[TrainState, Metrics]:
        extra_args, key, frozen, extra, step, x, placement = fixed
        params, opt_state = donated
        state, metrics = function(
            extra_args, key, TrainState(params, frozen, opt_state, extra, step), x
        )
        moved = _keep_placement((state.params, state.opt_state), placement)
        # Whatever a program returns is a new buffer: frozen weights that did not change stay out.
        frozen = jax.tree.map(lambda new, old: None if new is old else new, state.frozen, frozen)
        return TrainState(moved[0], frozen, moved[1], state.extra, state.step), metrics

    def call(extra_args: Any, key: KeyArray, state: TrainState, x: Any) -> Any:
        donated = (state.params, state.opt_state)
        fixed = (extra_args, key, state.frozen, state.extra, state.step, x, _placement(donated))
        new, metrics = jitted(fixed, donated)
        frozen = eqx.combine(new.frozen, state.frozen)
        return TrainState(new.params, frozen, new.opt_state, new.extra, new.step), metrics

    return call


def _update_part(parts: Any, key: KeyArray, state: TrainState, batch: Any) -> Any:
    update, loss = parts
    return update(loss, key, state, batch)


def _whole_step(parts: Any, key: KeyArray, state: TrainState, data: Any) -> Any:
    rollout, loss, update = parts
    k_rollout, k_update = jr.split(key)
    batch, metrics = rollout(k_rollout, state, data)
    state, more = update(loss, k_update, state, batch)
    return state, combine_metrics(metrics, more)


_jit_update = _donating(_update_part)
_jit_step = _donating(_whole_step)


def fuse(
    algorithm: Algorithm[Models, Data, Batch],
) -> Callable[[KeyArray, TrainState[Models], Data], tuple[TrainState[Models], Metrics]]:
    """`step(key, state, data) -> (state, metrics)`: rollout and update as one XLA program.

    For rollouts that are JAX functions. Map or vmap it over seeds or hyperparameters. The state
    passed in is used up.
    """

    def step(
        key: KeyArray, state: TrainState[Models], data: Data
    ) -> tuple[TrainState[Models], Metrics]:
        return _jit_step((algorithm.rollout, algorithm.loss, algorithm.update), key, state, data)

    return step


def train(
    algorithm: Algorithm[Models, Data, Batch],
    state: TrainState[Models],
    data: Callable[[int], Data],
    *,
    key: KeyArray,
    steps: int,
    fused: bool = False,
) -> Iterator[tuple[int, TrainState[Models], Metrics]]:
    """Run an algorithm from `state.step` up to `steps`, yielding (steps done, state, metrics)
    after each.

    `data(step)` is a pure function of the step. The update is jitted and reuses the buffers of
    the state it is given: whoever keeps a yielded state beyond the next step takes
    `snapshot(state)`. `fused` also takes the rollout into the jit. The device is never more than
    `AHEAD` steps behind, so that what waits for it does not fill the memory.
    """
    step = fuse(algorithm)
    pending: deque[Metrics] = deque()
    for i in range(int(state.step), steps):
        step_key = jr.fold_in(key, i)
        if fused:
            state, metrics = step(step_key, state, data(i))
        else:
            k_rollout, k_update = jr.split(step_key)
            batch, metrics = algorithm.rollout(k_rollout, state, data(i))
            state, more = _jit_update((algorithm.update, algorithm.loss), k_update, state, batch)
            metrics = combine_metrics(metrics, more)
        pending.append(metrics)
        if len(pending) > AHEAD:
            jax.block_until_ready(pending.popleft())
        yield i + 1, state, metrics


def snapshot(state: TrainState[Models]) -> TrainState[Models]:
    """A copy of what the next step will overwrite: parameters and optimizer state. The rest is
    shared.
    """
    params, opt_state = tree.copy((state.params, state.opt_state))
    return TrainState(
        params, state.frozen, opt_state, state.extra, jnp.array(state.step, copy=True)
    )
