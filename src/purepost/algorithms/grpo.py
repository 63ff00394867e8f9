"""Group Relative Policy Optimization.

A_i = (r_i − mean(r)) / (std(r) + ε)        over the G completions of one prompt
ρ_it = π(y_it) / π_old(y_it)
L = −Σ_i 1/T_i Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) / B + β KL(π‖π_ref)

Source: Shao et al., DeepSeekMath, 2402.03300, eq. 3. Differs from the paper:
1. β is 0 unless asked for, and the reference model is then not run.
2. The KL estimator is k3·ρ, whose gradient is that of the reverse KL; k3's is the forward KL's.
3. With one optimizer step per rollout, π_old is π itself held constant: ρ = 1 exactly, and no
   scoring pass is spent on it.
4. Completions that could not be scored leave the group's statistics and the loss.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ..advantages import Advantage, group_normalized, group_statistics
from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses import KL, Aggregate, Objective, clipped, k3_weighted, sequence_mean
from ..mean import Mean, Metrics, Spans, Terms, masked_mean, mean_of
from ..models.containers import WithReference, policy_trainable
from ..models.decoder import Decoder
from ..rollout.collect import Collect, Episodes, Tasks, episode_metrics, to_rows
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar

Models = WithReference[Decoder]


class PolicyBatch(eqx.Module):
    """Episodes in rows. Log-probabilities in nats."""

    rows: Rows
    weights: Float[Array, "b e"]  # 1 for a scored episode, 0 for one that does not count
    advantages: Float[Array, "b t"]
    sampler_logps: Float[Array, "b t"]
    old_logps: Float[Array, "b t"] | None  # None: the policy's own, held constant
    ref_logps: Float[Array, "b t"] | None
    temperature: Float[Array, " b"]


@eqx.filter_jit
def annotate(
    models: Models,
    episodes: Episodes,
    advantage: Advantage,
    *,
    per_row: int | None = None,
    score_old: bool = False,
    score_reference: bool = False,
) -> tuple[PolicyBatch, Metrics]:
    """Episodes in rows, with their advantages and the log-probabilities that the loss needs."""
    rows, places = to_rows(episodes, per_row=per_row)
    groups = episodes.prompts.tokens.shape[0]
    weights = places.per_episode(jnp.isfinite(episodes.rewards).astype(jnp.float32))
    spans = Spans(rows.mask, rows.episode, weights)
    advantages = advantage(episodes.rewards, episodes.group, groups)
    temperature = places.per_episode(episodes.temperature)[:, 0]

    def logps(model: Decoder) -> Float[Array, "b t"]:
        return score(model, rows, temperature=temperature).logps

    spread = group_statistics(episodes.rewards, episodes.group, groups)
    differ = jax.ops.segment_max(spread.informative.astype(jnp.float32), episodes.group, groups)
    batch = PolicyBatch(
        rows=rows,
        weights=weights,
        advantages=spans.spread(places.per_episode(advantages)),
        sampler_logps=places.per_token(episodes.logps),
        old_logps=logps(models.policy) if score_old else None,
        ref_logps=logps(models.reference) if score_reference and models.reference else None,
        temperature=temperature,
    )
    return batch, episode_metrics(episodes) | {
        "reward_std": masked_mean(spread.deviation, spread.count >= 2),
        "frac_reward_zero_std": mean_of(1.0 - differ),
    }


def grpo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    advantage: Advantage = group_normalized,
    objective: Objective = clipped,
    aggregate: Aggregate = sequence_mean,
    kl: KL = k3_weighted,
    beta: Scalar = 0.0,
    entropy: Scalar = 0.0,
    per_row: int | None = None,
    trainable: Callable[[Models], PyTree] = policy_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO over the episodes of `collect`: a row for each prompt, its group behind it.

    `beta` weighs the KL to `models.reference`, `entropy` a bonus (nats per token). `per_row` splits
    a group over rows of so many episodes, each with the prompt in front. Error: `beta` without a
    reference.
    """
    update = make_update(
        optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches
    )
    on_policy = epochs * minibatches == 1
    held, curious = (eqx.is_array(c) or bool(c != 0) for c in (beta, entropy))
    annotated = partial(annotate, per_row=per_row, score_old=not on_policy, score_reference=held)

    def rollout(
        key: KeyArray, state: TrainState[Models], data: Tasks
    ) -> tuple[PolicyBatch, Metrics]:
        models = state.models
        if held and models.reference is None:
            raise ValueError("beta ≠ 0 needs a reference; pass with_reference(policy)")
        episodes, metrics = collect(key, models.policy, data)
        batch, more = annotated(models, episodes, advantage)
        return batch, metrics | more

    def loss(key: KeyArray, models: Models, batch: PolicyBatch) -> tuple[Terms, Metrics]:
        scores = score(models.policy, batch.rows, temperature=batch.temperature)
        logps, mask = scores.logps, batch.rows.mask
        spans = Spans(mask, batch.rows.episode, batch.weights)
        old = jax.lax.stop_gradient(logps) if batch.old_logps is None else batch.old_logps
        losses, metrics = objective(logps, old, batch.advantages, spans)
        terms = {"policy": aggregate(losses, spans)}
        if batch.ref_logps is not None:
            metrics["kl"] = aggregate(kl(logps, old, batch.ref_logps, spans), spans)
            terms["kl"] = Mean(beta * metrics["kl"].total, metrics["kl"].weight)
        if curious:
            bonus = aggregate(scores.entropies, spans)
            terms["entropy"] = Mean(-entropy * bonus.total, bonus.weight)
        gap = jnp.abs(logps - batch.sampler_logps)
        metrics["sampling/sampling_logp_difference/mean"] = masked_mean(gap, mask)
        metrics["entropy"] = masked_mean(scores.entropies, mask)
        return terms, metrics

    return Algorithm(make_init(optimizer, trainable=trainable), rollout, loss, update)
