"""Exploratory Preference Optimization: online DPO with optimism.

y ~ π and y' ~ π_ref, ranked by a reward
L = −log σ(β(log π(y_c)/π_ref(y_c) − log π(y_r)/π_ref(y_r))) + α log π(y')

Source: Xie et al., 2405.21046, alg. 1. Differs from the paper: only the last rollout's pairs are
trained on, and completions of equal reward are no pair; their y' does not count either.
"""

from dataclasses import replace
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from ..algorithm import Algorithm, TrainState
from ..losses.limits import expect
from ..mean import Metrics, mean_of
from ..rollout.collect import Collect, Grouped, Tasks, episode_metrics
from ..rollout.labelled import best_and_worst
from ..types import KeyArray, Scalar
from .dpo import Models, Options, PairBatch, dpo


def xpo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    alpha: Scalar = 1e-5,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PairBatch]:
    """XPO; `collect` samples one completion of each prompt, once of the policy and once of the
    reference. Options are dpo's. Errors: a reference that is missing; groups.
    """
    expect("alpha", alpha, 0.0, or_low=True)
    if isinstance(collect, Grouped) and collect.group != 1:
        raise ValueError(f"expected 1 completion of each prompt, got {collect.group}; pass group=1")
    offline = dpo(optimizer, **options)

    def rollout(key: KeyArray, state: TrainState[Models], data: Tasks) -> tuple[PairBatch, Metrics]:
        models = state.models
        if models.reference is None:
            raise ValueError("expected a reference, got none; pass with_reference(policy)")
        k_policy, k_reference = jr.split(key)
        own, metrics = collect(k_policy, models.policy, data)
        other, _ = collect(k_reference, models.reference, data)
        n, p = own.group.shape[0], own.prompts.tokens.shape[0]
        if n != p:
            raise ValueError(f"expected 1 completion of each prompt, got {n} of {p}; pass group=1")
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), own, other)
        pairs, picked = best_and_worst(eqx.tree_at(lambda e: e.prompts, both, own.prompts))
        batch, more = offline.rollout(key, state, pairs)
        bonus = jnp.where(picked >= n, alpha, 0.0)  # the reference's stand behind the policy's
        tied = {"frac_tied": mean_of(1.0 - pairs.real.astype(jnp.float32))}
        return replace(batch, bonus=bonus), episode_metrics(own) | metrics | more | tied

    return Algorithm(offline.init, rollout, offline.loss, offline.update)
