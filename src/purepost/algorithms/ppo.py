"""Proximal Policy Optimization with a critic.

r_t = r_i at the last token − β (log π_old(y_t) − log π_ref(y_t))
δ_t = r_t + γ V(s_{t+1}) − V(s_t),     A_t = δ_t + γλ A_{t+1}, whitened over the batch's tokens
L   = −Σ min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t) / Σ T + c ½Σ max((V − R)², (clip(V) − R)²) / Σ T

Source: Schulman et al., PPO, 1707.06347, eq. 7, 9; for language models Ouyang et al., InstructGPT,
2203.02155, §3.5; β adapts as in Ziegler et al., 1909.08593. With `correction=tis(high=...)` it is
decoupled PPO, Hilton et al., 2110.00641, eq. 5. Differs from the papers:
1. The critic's head starts at 0: on a trunk of its own, on the policy's (`one_trunk`), or on the
   policy's without training it (`detached`).
2. π_old in the penalty is the sampler's; values, advantages and returns are found once a rollout.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ..adapt import adaptive_kl
from ..advantages import gae
from ..algorithm import Algorithm, InitFn, Steps, TrainState, make_init, make_update
from ..losses import (
    Aggregate,
    Correction,
    Objective,
    check_positive,
    clipped,
    clipped_value,
    sequence_sum,
    token_mean,
)
from ..losses.limits import expect
from ..mean import Metrics, Spans, Terms, masked_mean
from ..models.containers import WithReference
from ..models.critic import ActorCritic, actor_critic_trainable, expect_critic
from ..policy_batch import ActorCriticBatch, Decay, Estimate, annotate, check_parts, judge
from ..rollout.collect import Collect, Lay, Tasks, to_rows
from ..rollout.score import score
from ..turns import token_rewards
from ..types import KeyArray, Scalar


class Options(Steps, total=False):
    """The keyword arguments of `ppo`, as its variants hand them on."""

    objective: Objective
    aggregate: Aggregate
    correction: Correction | None
    gamma: Scalar
    decay: Decay
    value_decay: Decay | None
    estimate: Estimate
    value_clip: Scalar
    value_weight: Scalar
    beta: Scalar
    target: Scalar | None
    entropy: Scalar
    positive_nll: Scalar
    trainable: Callable[[ActorCritic], PyTree]
    lay: Lay


def ppo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    objective: Objective = clipped,
    aggregate: Aggregate = token_mean,
    correction: Correction | None = None,
    gamma: Scalar = 1.0,
    decay: Decay = lambda lengths: jnp.full(lengths.shape, 0.95),
    value_decay: Decay | None = None,
    estimate: Estimate = gae,
    value_clip: Scalar = 0.2,
    value_weight: Scalar = 0.5,
    beta: Scalar = 0.0,
    target: Scalar | None = None,
    entropy: Scalar = 0.0,
    positive_nll: Scalar = 0.0,
    trainable: Callable[[ActorCritic], PyTree] = actor_critic_trainable,
    lay: Lay = to_rows,
    **steps: Unpack[Steps],
) -> Algorithm[ActorCritic, Tasks, ActorCriticBatch]:
    """PPO over the episodes of `collect`, on `actor_critic(...)` or `one_trunk(...)`.

    `decay` gives λ of the advantages, `value_decay` of the returns (the same); `estimate=turn_gae`
    takes turns for steps of time. β starts at `beta` and adapts towards a KL of `target` nats per
    episode. `entropy` weighs a bonus, `positive_nll` −log π of episodes whose reward is positive.
    """
    check_parts(collect, token_rewards, objective, aggregate, lay)
    check_positive(gamma=gamma, value_clip=value_clip, value_weight=value_weight)
    for name, number in {"beta": beta, "entropy": entropy, "positive_nll": positive_nll}.items():
        expect(name, number, 0.0, or_low=True)
    held, curious = (eqx.is_array(c) or bool(c != 0) for c in (beta, entropy))
    reused = steps.get("epochs", 1) * steps.get("minibatches", 1) > 1
    annotated = partial(annotate, lay=lay, old=reused, reference=held or target is not None)
    judged = partial(judge, gamma=gamma, decay=decay, value_decay=value_decay, estimate=estimate)

    def rollout(
        key: KeyArray, state: TrainState[ActorCritic], data: Tasks
    ) -> tuple[ActorCriticBatch, Metrics]:
        episodes, metrics = collect(key, state.models.policy, data)
        models = WithReference(state.models.policy, state.models.reference)
        batch, more = annotated(models, episodes, token_rewards)
        return judged(state.models, batch, state.extra), more | metrics

    def loss(key: KeyArray, models: ActorCritic, batch: ActorCriticBatch) -> tuple[Terms, Metrics]:
        b, spans = batch.policy, batch.policy.spans
        policy, values = models.evaluate(b.rows)
        scores = score(policy, b.rows, temperature=b.temperature)
        losses, metrics = b.surrogate(scores.logps, objective, correction)
        errors, more = clipped_value(values, batch.values, batch.returns, spans, clip=value_clip)
        terms = {"policy": aggregate(losses, spans)} | _positive(batch, scores.logps, positive_nll)
        terms["value"] = token_mean(errors, spans).times(value_weight)
        if curious:
            terms["entropy"] = aggregate(scores.entropies, spans).times(-entropy)
        if b.ref_logps is not None:
            more["kl"] = sequence_sum(b.sampler_logps - b.ref_logps, spans)
        return terms, metrics | more | {"entropy": masked_mean(scores.entropies, spans.mask)}

    update = make_update(optimizer, after=None if target is None else adaptive_kl(target), **steps)
    return Algorithm(_init(optimizer, trainable, beta), rollout, loss, update)


def _positive(batch: ActorCriticBatch, logps: Float[Array, "b t"], weight: Scalar) -> Terms:
    """−log π of episodes whose reward is positive, if it has a weight."""
    if not eqx.is_array(weight) and weight == 0:
        return {}
    rows = batch.policy.rows
    good = Spans(rows.mask & (batch.rewards > 0), rows.episode, batch.policy.weights)
    return {"positive": token_mean(-logps, good).times(weight)}


def _init(
    optimizer: optax.GradientTransformation,
    trainable: Callable[[ActorCritic], PyTree],
    beta: Scalar,
) -> InitFn[ActorCritic]:
    """An init that refuses models without a critic, and carries β along."""
    return make_init(
        optimizer,
        trainable=lambda models: trainable(expect_critic(models)),
        extra=lambda models: jnp.float32(beta),
    )
