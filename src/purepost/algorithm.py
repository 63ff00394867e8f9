"""The tuple (init, rollout, loss, update) that every algorithm is, and how most of them make init
and update.

A loss is a sum of means with denominators of their own, Σ_k total_k / W_k. W_k depends on the
batch only, so the gradient of any split of the batch into micro-batches is the gradient of the
whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from . import tree
from .accumulate import accumulate
from .mean import Mean, Metrics, Terms, add, scalar_mean
from .offload import fetch, put_back
from .types import KeyArray, num_rows

Models = TypeVar("Models")
Data = TypeVar("Data")
Batch = TypeVar("Batch")
Data_in = TypeVar("Data_in", contravariant=True)
Batch_in = TypeVar("Batch_in", contravariant=True)
Batch_out = TypeVar("Batch_out", covariant=True)
Models_in = TypeVar("Models_in", contravariant=True)


class OptState(eqx.Module):
    """The optimizer's state, and float32 masters of the parameters kept in fewer bits (None for
    the others).
    """

    master: PyTree
    inner: PyTree


class TrainState(eqx.Module, Generic[Models]):
    """Everything a run carries from step to step.

    `params` and `frozen` are the two halves of one models pytree.
    """

    params: Models  # None where a leaf is not trained
    frozen: Models  # its complement: base weights, a reference, a teacher
    opt_state: OptState
    extra: PyTree  # what an algorithm carries along: a KL coefficient, a running mean
    step: Int[Array, ""]  # loop steps done

    @property
    def models(self) -> Models:
        """The whole models pytree."""
        return eqx.combine(self.params, self.frozen)


@runtime_checkable
class InitFn(Protocol[Models]):
    """(key, models) → state."""

    def __call__(self, key: KeyArray, models: Models) -> TrainState[Models]:
        """The state before the first step."""
        ...


@runtime_checkable
class RolloutFn(Protocol[Models, Data_in, Batch_out]):
    """(key, state, data) → (batch, metrics). All that needs no gradient."""

    def __call__(
        self, key: KeyArray, state: TrainState[Models], data: Data_in
    ) -> tuple[Batch_out, Metrics]:
        """Turn one step's data into a training batch."""
        ...


@runtime_checkable
class LossFn(Protocol[Models_in, Batch_in]):
    """(key, models, batch) → (terms, metrics): the loss is the sum of the terms' values."""

    def __call__(self, key: KeyArray, models: Models_in, batch: Batch_in) -> tuple[Terms, Metrics]:
        """Terms of the loss as sums and weights. The weights depend on the batch only."""
        ...


@runtime_checkable
class UpdateFn(Protocol[Models, Batch]):
    """(loss, key, state, batch) → (state, metrics)."""

    def __call__(
        self,
        loss: LossFn[Models, Batch],
        key: KeyArray,
        state: TrainState[Models],
        batch: Batch,
    ) -> tuple[TrainState[Models], Metrics]:
        """One loop step's optimizer steps on a batch."""
        ...


@dataclass(frozen=True)
class Algorithm(Generic[Models, Data, Batch]):
    """A post-training algorithm.

    Any part may be replaced: `dataclasses.replace(algorithm, loss=...)`.
    """

    init: InitFn[Models]
    rollout: RolloutFn[Models, Data, Batch]
    loss: LossFn[Models, Batch]
    update: UpdateFn[Models, Batch]

    def parts(
        self,
    ) -> tuple[
        InitFn[Models],
        RolloutFn[Models, Data, Batch],
        LossFn[Models, Batch],
        UpdateFn[Models, Batch],
    ]:
        """(init, rollout, loss, update), each with its type."""
        return self.init, self.rollout, self.loss, self.update


def _master(params: PyTree) -> PyTree:
    """Float32 copies of the leaves that have fewer bits, None for the others."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize < 4 else None, params)


def _full(params: PyTree, master: PyTree) -> PyTree:
    """The parameters in float32."""
    return jax.tree.map(lambda p, m: p if m is None else m, params, master)


def make_init(
    optimizer: optax.GradientTransformation,
    *,
    trainable: Callable[[Models], PyTree],
    extra: Callable[[Models], PyTree] = lambda models: None,
) -> InitFn[Models]:
    """An init that copies what trains and leaves the rest where it is.

    `trainable(models)` is a pytree of bools: which leaves train. `extra(models)` is what the
    algorithm carries along.
    """

    def init(key: KeyArray, models: Models) -> TrainState[Models]:
        params, frozen = eqx.partition(models, trainable(models))
        if not jax.tree.leaves(params):
            raise ValueError("expected at least one trainable leaf, got none; mend `trainable`")
        for name, leaf in tree.named_leaves(params):
            if not eqx.is_inexact_array(leaf):
                raise ValueError(
                    f"expected trainable leaves to be float arrays, got {name}: {leaf}"
                )
        params = tree.copy(params)
        master = _master(params)
        with jax.numpy_dtype_promotion("standard"):
            inner = optimizer.init(_full(params, master))
        return TrainState(
            params, frozen, OptState(master, inner), extra(models), jnp.zeros((), jnp.int32)
        )

    return init


def _value(terms: Terms, weights: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """Σ_k total_k / W_k, where W_k = 0 gives 0."""
    return sum(
        (Mean(terms[k].total, jax.lax.stop_gradient(w)).value for k, w in weights.items()),
        start=jnp.zeros(()),
    )


def accumulate_gradient(
    loss: LossFn[Models, Batch],
    key: KeyArray,
    params: Models,
    frozen: Models,
    batch: Batch,
    microbatches: int = 1,
) -> tuple[Terms, Metrics, Models]:
    """The gradient (float32) of Σ_k total_k / W_k over the whole batch, a micro-batch at a time.

    Every micro-batch gets the same key: randomness belongs to the row (`Rows.ids`), not to its
    place.
    """

    def objective(
        params: Models, batch: Batch, weights: dict[str, Float[Array, ""]] | None
    ) -> tuple[Float[Array, ""], tuple[Terms, Metrics]]:
        terms, metrics = loss(key, eqx.combine(params, frozen), batch)
        own = {k: m.weight for k, m in terms.items()}
        return _value(terms, own if weights is None else weights), (terms, metrics)

    if microbatches == 1:
        (_, (terms, metrics)), grads = jax.value_and_grad(objective, has_aux=True)(
            params, batch, None
        )
        return terms, metrics, jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    parts = tree.split_rows(tree.pad_rows(batch, microbatches), microbatches)

    def only_weights(part: Batch) -> dict[str, Float[Array, ""]]:
        return {k: m.weight for k, m in loss(key, eqx.combine(params, frozen), part)[0].items()}

    # Nothing here needs the forward pass, and XLA drops it from this scan.
    weights = jax.tree.map(lambda w: w.sum(0), jax.lax.map(only_weights, parts))

    (terms, metrics), grads = accumulate(partial(objective, weights=weights), params, parts)
    return terms, metrics, grads


def apply_gradient(
    optimizer: optax.GradientTransformation,
    ok: Bool[Array, ""],
    grads: Models,
    params: Models,
    opt_state: OptState,
) -> tuple[Models, OptState]:
    """One optimizer step in float32, written back in the parameters' own dtype.

    Not ok: both stay, to the bit. An optimizer state in the host's memory goes back there.
    """
    places, opt_state = opt_state, fetch(opt_state, ok)

    def put(new: Any, old: Any) -> Any:
        return new.astype(old.dtype) if eqx.is_array(old) else old

    def step() -> PyTree:
        full = _full(params, opt_state.master)
        with jax.numpy_dtype_promotion("standard"):
            updates, inner = optimizer.update(cast(optax.Updates, grads), opt_state.inner, full)
            moved = optax.apply_updates(full, updates)
        master = jax.tree.map(
            lambda m, new: None if m is None else put(new, m),
            opt_state.master,
            moved,
            is_leaf=lambda x: x is None,
        )
        inner = jax.tree.map(put, inner, opt_state.inner)
        return eqx.filter((jax.tree.map(put, moved, params), OptState(master, inner)), eqx.is_array)

    # A branch, where choosing between all numbers old and new would keep copies of the old.
    stay = lambda: eqx.filter((params, opt_state), eqx.is_array)  # noqa: E731
    params, opt_state = eqx.combine(jax.lax.cond(ok, step, stay), (params, opt_state))
    return params, put_back(opt_state, places)


def optimizer_step(
    optimizer: optax.GradientTransformation,
    loss: LossFn[Models, Batch],
    key: KeyArray,
    params: Models,
    frozen: Models,
    opt_state: OptState,
    batch: Batch,
    microbatches: int = 1,
) -> tuple[Models, OptState, Metrics]:
    """One optimizer step on a batch, and its metrics.

    If the loss or the gradient is not finite, or nothing in the batch has weight, parameters and
    optimizer state stay as they were, to the bit, and `skipped` counts it.
    """
    terms, metrics, grads = accumulate_gradient(loss, key, params, frozen, batch, microbatches)
    weights = {name: m.weight for name, m in terms.items()}
    value, norm = _value(terms, weights), optax.tree.norm(grads)
    weighted = jnp.any(jnp.stack([w > 0 for w in weights.values()]))
    ok = jnp.isfinite(value) & jnp.isfinite(norm) & weighted
    params, opt_state = apply_gradient(optimizer, ok, grads, params, opt_state)
    done = ok.astype(jnp.float32)
    own = {
        "loss": Mean(jnp.where(ok, value, 0.0), done),
        "grad_norm": Mean(jnp.where(ok, norm, 0.0), done),
        "skipped": scalar_mean(1.0 - done),
    }
    named = {f"loss/{name}": m for name, m in terms.items()} if len(terms) > 1 else {}
    return params, opt_state, metrics | named | own


class Steps(TypedDict, total=False):
    """How a factory divides its batch into optimizer steps and model passes; 1 each by default."""

    epochs: int
    minibatches: int
    microbatches: int


def make_update(
    optimizer: optax.GradientTransformation,
    *,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
    after: Callable[[KeyArray, TrainState[Models], Metrics], TrainState[Models]] | None = None,
) -> UpdateFn[Models, Any]:
    """An update of `epochs × minibatches` optimizer steps, each in `microbatches` model passes.

    Rows are split strided: minibatch m takes the rows m, m + minibatches, …. A minibatch that does
    not divide into micro-batches is filled up with rows of weight 0. `after` runs once, at the end.
    Error: a batch that minibatches do not divide.
    """
    for name, n in dict(epochs=epochs, minibatches=minibatches, microbatches=microbatches).items():
        if n < 1:
            raise ValueError(f"expected {name} ≥ 1, got {n}")

    def update(
        loss: LossFn[Models, Batch], key: KeyArray, state: TrainState[Models], batch: Batch
    ) -> tuple[TrainState[Models], Metrics]:
        rows = num_rows(batch)
        if rows % minibatches:
            raise ValueError(
                f"batch of {rows} rows is not divisible by minibatches {minibatches}; "
                "change one, or pad the batch with tree.pad_rows"
            )
        k_loss, k_after = jr.split(key)

        def step(carry: Any, x: Any) -> tuple[Any, Metrics]:
            k, part = x
            *moved, metrics = optimizer_step(
                optimizer, loss, k, carry[0], state.frozen, carry[1], part, microbatches
            )
            return tuple(moved), metrics

        carry = (state.params, state.opt_state)
        keys = jr.split(k_loss, (epochs, minibatches))
        if epochs * minibatches == 1:
            carry, metrics = step(carry, (keys[0, 0], batch))
        else:
            parts = tree.split_rows(batch, minibatches)
            carry, stacked = jax.lax.scan(
                lambda carry, ks: jax.lax.scan(step, carry, (ks, parts)), carry, keys
            )
            metrics = jax.tree.map(lambda x: x.sum((0, 1)), stacked)
        params, opt_state = carry
        new = TrainState(params, state.frozen, opt_state, state.extra, state.step + 1)
        return (new if after is None else after(k_after, new, metrics)), metrics

    return update


def combine_metrics(*metrics: Metrics) -> Metrics:
    """All metrics in one dict; the same name twice is added up."""
    total: Metrics = {}
    for some in metrics:
        shared = total.keys() & some.keys()
        total |= some | add({k: total[k] for k in shared}, {k: some[k] for k in shared})
    return total
