"""Proximal Policy Optimization with a critic.

r_t = r_i at the last token − β (log π_old(y_t) − log π_ref(y_t))
δ_t = r_t + γ V(s_{t+1}) − V(s_t),     A_t = δ_t + γλ A_{t+1}, whitened over the batch's tokens
L   = −Σ min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t) / Σ T + c ½Σ max((V − R)², (clip(V) − R)²) / Σ T

Source: Schulman et al., PPO, 1707.06347, eq. 7, 9; for language models Ouyang et al., InstructGPT,
2203.02155, §3.5; β adapts as in Ziegler et al., 1909.08593. Differs from the papers:
1. The critic is a trunk of its own, a copy of the policy's, with a head that starts at 0.
2. π_old in the penalty is the sampler's; values, advantages and returns are found once a rollout.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ..advantages import at_last_token, gae, uncompared, whiten
from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses import (
    Aggregate,
    Objective,
    check_positive,
    clipped,
    clipped_value,
    sequence_sum,
    token_mean,
)
from ..mean import Metrics, Spans, Terms
from ..models.containers import WithReference
from ..models.critic import ActorCritic, actor_critic_trainable
from ..models.heads import ValueHead
from ..policy_batch import PolicyBatch, annotate
from ..rollout.collect import Collect, Tasks
from ..rollout.score import score
from ..types import KeyArray, Scalar

# T_i of each token's episode → λ
Decay = Callable[[Float[Array, "b t"]], Float[Array, "b t"]]


class ActorCriticBatch(eqx.Module):
    """Episodes in rows, and what the critic said of them."""

    policy: PolicyBatch
    values: Float[Array, "b t"]
    returns: Float[Array, "b t"]
    rewards: Float[Array, "b t"]  # the episode's, at each of its trained tokens


def ppo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    objective: Objective = clipped,
    aggregate: Aggregate = token_mean,
    gamma: Scalar = 1.0,
    decay: Decay = lambda lengths: jnp.full(lengths.shape, 0.95),
    value_decay: Decay | None = None,
    value_clip: Scalar = 0.2,
    value_weight: Scalar = 0.5,
    beta: Scalar = 0.0,
    target: Scalar | None = None,
    positive_nll: Scalar = 0.0,
    trainable: Callable[[ActorCritic], PyTree] = actor_critic_trainable,
    **steps: int,
) -> Algorithm[ActorCritic, Tasks, ActorCriticBatch]:
    """PPO over the episodes of `collect`, on `actor_critic(with_reference(policy))`.

    `decay` gives λ of the advantages, `value_decay` of the returns (the same). β starts at `beta`
    and adapts towards a KL of `target` nats per episode. `positive_nll` weighs −log π of episodes
    whose reward is positive. `steps`: epochs, minibatches, microbatches.
    """
    check_positive(gamma=gamma, value_clip=value_clip, value_weight=value_weight)
    adapted = None if target is None else partial(_adapt, target=target)
    held = target is not None or eqx.is_array(beta) or bool(beta != 0)
    reused = steps.get("epochs", 1) * steps.get("minibatches", 1) > 1
    judged = partial(_judge, gamma=gamma, decay=decay, value_decay=value_decay or decay)

    def rollout(
        key: KeyArray, state: TrainState[ActorCritic], data: Tasks
    ) -> tuple[ActorCriticBatch, Metrics]:
        episodes, metrics = collect(key, state.models.policy, data)
        models = WithReference(state.models.policy, state.models.reference)
        batch, more = annotate(models, episodes, uncompared, old=reused, reference=held)
        return judged(state.models.critic, batch, state.extra), more | metrics

    def loss(key: KeyArray, models: ActorCritic, batch: ActorCriticBatch) -> tuple[Terms, Metrics]:
        b, terms = batch.policy, {}
        logps = score(models.policy, b.rows, temperature=b.temperature).logps
        spans = Spans(b.rows.mask, b.rows.episode, b.weights)
        old = jax.lax.stop_gradient(logps) if b.old_logps is None else b.old_logps
        losses, metrics = objective(logps, old, b.advantages, spans)
        terms["policy"] = aggregate(losses, spans)
        values = models.critic(b.rows)
        errors, more = clipped_value(values, batch.values, batch.returns, spans, clip=value_clip)
        terms["value"] = token_mean(errors, spans).times(value_weight)
        if eqx.is_array(positive_nll) or positive_nll != 0:
            good = Spans(b.rows.mask & (batch.rewards > 0), b.rows.episode, b.weights)
            terms["positive"] = token_mean(-logps, good).times(positive_nll)
        if b.ref_logps is not None:
            more["kl"] = sequence_sum(b.sampler_logps - b.ref_logps, spans)
        return terms, metrics | more

    make = make_init(optimizer, trainable=trainable, extra=lambda models: jnp.float32(beta))
    return Algorithm(make, rollout, loss, make_update(optimizer, after=adapted, **steps))


@eqx.filter_jit
def _judge(
    critic: ValueHead,
    batch: PolicyBatch,
    beta: Float[Array, ""],
    *,
    gamma: Scalar,
    decay: Decay,
    value_decay: Decay,
) -> ActorCriticBatch:
    """Values, advantages and returns of the episodes, whose rewards stand as advantages."""
    spans = Spans(batch.rows.mask, batch.rows.episode, batch.weights)
    rewards = at_last_token(batch.advantages, spans)
    if batch.ref_logps is not None:
        rewards -= beta * (batch.sampler_logps - batch.ref_logps)
    values, lengths = critic(batch.rows), spans.spread(spans.lengths)
    advantages, _ = gae(rewards, values, spans, gamma=gamma, decay=decay(lengths))
    _, returns = gae(rewards, values, spans, gamma=gamma, decay=value_decay(lengths))
    white = whiten(advantages, spans.spread(spans.weights))
    policy = dataclasses.replace(batch, advantages=white)
    return ActorCriticBatch(policy, values, returns, batch.advantages)


def _adapt(
    key: KeyArray, state: TrainState[ActorCritic], metrics: Metrics, *, target: Scalar
) -> TrainState[ActorCritic]:
    """β up where the KL is above its target, down where it is below; as it is without one."""
    if "kl" not in metrics:
        return state
    error = jnp.clip(metrics["kl"].value / target - 1, -0.2, 0.2)
    return dataclasses.replace(state, extra=state.extra * (1 + 0.1 * error))
