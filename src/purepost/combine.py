"""Several algorithms as one: their losses added up, each over a batch of its own.

def policy(models: WithReference[Decoder]) -> Decoder:
    return models.policy

algorithm = combine(
    Part("rl", grpo(optimizer, collect)),
    Part("sft", over(policy, sft(optimizer)), weight=0.1),
)
train(algorithm, state, lambda step: (tasks(step), rows(step)), ...)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import jax.random as jr
from jaxtyping import PyTree

from . import tree
from .algorithm import Algorithm, Batch, Data, LossFn, Models, TrainState
from .losses.limits import expect
from .mean import Mean, Metrics, Terms
from .types import KeyArray, Scalar, num_rows

Whole = TypeVar("Whole")
D1 = TypeVar("D1")
D2 = TypeVar("D2")
D3 = TypeVar("D3")
B1 = TypeVar("B1")
B2 = TypeVar("B2")
B3 = TypeVar("B3")


@dataclass(frozen=True)
class Part(Generic[Models, Data, Batch]):
    """An algorithm in a combination: the name before its terms and metrics, and its loss's weight.

    Error: a negative weight.
    """

    name: str
    algorithm: Algorithm[Models, Data, Batch]
    weight: Scalar = 1.0

    def __post_init__(self) -> None:
        expect("weight", self.weight, 0.0, or_low=True)

    def named(self, means: dict[str, Mean]) -> dict[str, Mean]:
        """The means under the part's name: "rl/reward"."""
        return {f"{self.name}/{name}": mean for name, mean in means.items()}


@overload
def combine(
    first: Part[Models, D1, B1], second: Part[Models, D2, B2], /
) -> Algorithm[Models, tuple[D1, D2], tuple[B1, B2]]:
    """Two."""
    ...


@overload
def combine(
    first: Part[Models, D1, B1], second: Part[Models, D2, B2], third: Part[Models, D3, B3], /
) -> Algorithm[Models, tuple[D1, D2, D3], tuple[B1, B2, B3]]:
    """Three."""
    ...


def combine(*parts: Part[Models, Any, Any]) -> Algorithm[Models, Any, Any]:
    """One algorithm whose loss is Σ weight · loss over the parts, all of one models pytree (`over`
    makes them so). Data and batch are tuples, a place for each part; every term keeps its own
    denominator.

    Init and update are the first's: its optimizer, what it trains, its epochs and minibatches, what
    it carries along and what it moves after a step; of the others, rollout and loss count. Batches
    of fewer rows are filled up with rows of weight 0, which cost as much as others: sizes had
    better be alike. Errors: fewer than two parts, a name twice; at init, another part than the
    first that carries something along; at the first step, data of another number of parts.
    """
    names = [part.name for part in parts]
    if len(parts) < 2 or len(set(names)) < len(names):
        raise ValueError(f"expected at least two parts, each with a name of its own, got {names}")
    first = parts[0].algorithm

    def init(key: KeyArray, models: Models) -> TrainState[Models]:
        for part in parts[1:]:
            state = eqx.filter_eval_shape(part.algorithm.init, key, models)
            if jax.tree.leaves(state.extra):
                raise ValueError(
                    f"expected only the first part to carry something from step to step, got "
                    f"{part.name!r} that does; put it first"
                )
        return first.init(key, models)

    def rollout(
        key: KeyArray, state: TrainState[Models], data: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Metrics]:
        if len(data) != len(parts):
            raise ValueError(f"expected data for each of {names}, got {len(data)} of them")
        batches, metrics = [], {}
        for part, k, own in zip(parts, jr.split(key, len(parts)), data, strict=True):
            batch, more = part.algorithm.rollout(k, state, own)
            batches.append(batch)
            metrics |= part.named(more)
        most = max(map(num_rows, batches))
        return tuple(tree.pad_rows(batch, most) for batch in batches), metrics

    def loss(key: KeyArray, models: Models, batch: tuple[Any, ...]) -> tuple[Terms, Metrics]:
        terms, metrics = {}, {}
        for part, k, own in zip(parts, jr.split(key, len(parts)), batch, strict=True):
            some, more = part.algorithm.loss(k, models, own)
            terms |= part.named({name: mean.times(part.weight) for name, mean in some.items()})
            metrics |= part.named(more)
        return terms, metrics

    return Algorithm(init, rollout, loss, first.update)


def over(
    view: Callable[[Whole], Models], algorithm: Algorithm[Models, Data, Batch]
) -> Algorithm[Whole, Data, Batch]:
    """The algorithm on larger models, of which `view` gives it its own; the rest is frozen.

    A view picks and arranges, and computes nothing: `lambda m: m.policy`, or
    `lambda m: WithReference(m.student)`. Error, at init: one that uses a leaf twice.
    """

    def put(whole: PyTree, own: PyTree) -> PyTree:
        """The whole with the algorithm's own leaves in their places."""
        leaves, structure = jax.tree.flatten(whole, is_leaf=_absent)
        places = view(jax.tree.unflatten(structure, range(len(leaves))))
        places = jax.tree.leaves(places, is_leaf=_absent)
        used = [place for place in places if place is not None]
        if len(set(used)) < len(used):
            raise ValueError("expected a view that uses every leaf once at most, got one twice")
        for place, leaf in zip(places, jax.tree.leaves(own, is_leaf=_absent), strict=True):
            if place is not None:
                leaves[place] = leaf
        return jax.tree.unflatten(structure, leaves)

    def narrow(state: TrainState[Whole]) -> TrainState[Models]:
        params, frozen = view(state.params), view(state.frozen)
        return TrainState(params, frozen, state.opt_state, state.extra, state.step)

    def widen(params: Whole, frozen: Whole, own: TrainState[Models]) -> TrainState[Whole]:
        params, frozen = put(params, own.params), put(frozen, own.frozen)
        return TrainState(params, frozen, own.opt_state, own.extra, own.step)

    def init(key: KeyArray, models: Whole) -> TrainState[Whole]:
        none = jax.tree.map(lambda _: None, models)
        return widen(none, models, algorithm.init(key, view(models)))

    def rollout(key: KeyArray, state: TrainState[Whole], data: Data) -> tuple[Batch, Metrics]:
        return algorithm.rollout(key, narrow(state), data)

    def loss(key: KeyArray, models: Whole, batch: Batch) -> tuple[Terms, Metrics]:
        return algorithm.loss(key, view(models), batch)

    def update(
        loss: LossFn[Whole, Batch], key: KeyArray, state: TrainState[Whole], batch: Batch
    ) -> tuple[TrainState[Whole], Metrics]:
        def own_loss(key: KeyArray, models: Models, batch: Batch) -> tuple[Terms, Metrics]:
            return loss(key, put(state.models, models), batch)

        own, metrics = algorithm.update(own_loss, key, narrow(state), batch)
        return widen(state.params, state.frozen, own), metrics

    return Algorithm(init, rollout, loss, update)


def _absent(x: Any) -> bool:
    return x is None
