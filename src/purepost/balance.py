"""The load of a mixture of experts kept even, as a term that any loss can have.

L ← L + c · e Σ_i f_i p_i        f_i: the share of tokens that choose expert i; p_i: its probability

Source: Fedus et al., Switch Transformers, 2101.03961, eq. 4-6; f over the whole batch: Qiu et al.,
Demons in the Detail, 2501.11873, eq. 4. Differs from the papers: 1. layers share f and p, as in
transformers. 2. f is of the step's whole batch by the model as it was before the step, so that
minibatches and micro-batches share it and the term is a Mean.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .algorithm import Algorithm, TrainState, UpdateFn
from .losses.limits import expect
from .mean import Metrics, Terms, scalar_mean
from .models.computed import Computed
from .models.decoder import KV, Decoder
from .models.moe import expert_shares, load_balance, real_tokens
from .types import KeyArray, Rows, Scalar, num_rows

Models = TypeVar("Models")
Data = TypeVar("Data")
Batch = TypeVar("Batch")


class Balanced(eqx.Module, Generic[Batch]):
    """A batch, and how the load lay when it was made."""

    batch: Batch
    shares: Float[Array, "b e"]  # the same in all rows; a row that fills up has zeros


def trained_model(models: Any) -> Decoder:
    """The model that trains: itself where it is alone, else the policy or the student."""
    match models:
        case Decoder() as model:
            return model
        case eqx.Module(policy=Decoder() as model) | eqx.Module(student=Decoder() as model):
            return model
    raise ValueError(
        f"expected a Decoder, or one as policy or student, got {type(models).__name__}; "
        "say where the model is by `model`"
    )


def trained_rows(batch: Any) -> Rows:
    """The rows that a loss reads: the batch itself, or those in it."""
    match batch:
        case Rows():
            return batch
        case eqx.Module(rows=Rows() as rows):
            return rows
    raise ValueError(
        f"expected Rows, or a batch with rows, got {type(batch).__name__}; "
        "say where they are by `rows`"
    )


def with_load_balancing(
    algorithm: Algorithm[Models, Data, Batch],
    coefficient: Scalar,
    *,
    model: Callable[[Models], Decoder] = trained_model,
    rows: Callable[[Batch], Rows] = trained_rows,
) -> Algorithm[Models, Data, Balanced[Batch]]:
    """The algorithm with `coefficient` times the load-balancing loss as a term of its own.

    `model` is the mixture of experts that the loss runs, on the batch's `rows`, once. A step costs
    one more pass over them, without gradient. Errors: a model without experts; a loss that runs it
    on other rows.
    """
    expect("coefficient", coefficient, 0.0)

    def init(key: KeyArray, models: Models) -> TrainState[Models]:
        if not model(models).config.num_experts:
            raise ValueError("expected a mixture of experts, got a dense model: no load to balance")
        return algorithm.init(key, models)

    def rollout(
        key: KeyArray, state: TrainState[Models], data: Data
    ) -> tuple[Balanced[Batch], Metrics]:
        batch, metrics = algorithm.rollout(key, state, data)
        shares = shares_of(model(state.models), rows(batch))
        decoder = model(state.models).config
        even = decoder.experts_per_token / decoder.num_experts
        metrics = metrics | {"expert_load": scalar_mean(shares.max() / even)}
        spread = jnp.broadcast_to(shares, (num_rows(batch), *shares.shape))
        return Balanced(batch, spread), metrics

    def loss(key: KeyArray, models: Models, batch: Balanced[Batch]) -> tuple[Terms, Metrics]:
        mine, read = rows(batch.batch), model(models)
        hidden, kept = read(mine, key=key)
        done = eqx.tree_at(model, models, Computed(hidden, read.unembed, mine))
        terms, metrics = algorithm.loss(key, done, batch.batch)
        found = load_balance(_router(kept), real_tokens(mine), batch.shares.max(0))
        terms = terms | {"load_balance": found.times(coefficient)}
        return terms, metrics | {"load_balance": found}

    update = cast(UpdateFn[Models, Balanced[Batch]], algorithm.update)  # of whatever rows
    return Algorithm(init, rollout, loss, update)


@eqx.filter_jit
def shares_of(model: Decoder, rows: Rows) -> Float[Array, " e"]:
    """f_i of the rows."""
    _, kept = model(rows)
    return expert_shares(_router(kept), real_tokens(rows), model.config.experts_per_token)


def _router(kept: KV) -> Float[Array, "l b t e"]:
    """The router's probabilities of all layers that have one."""
    if kept.router is None:
        raise ValueError("expected a mixture of experts, got a dense model: no load to balance")
    return kept.router
