"""From episodes to the batch that a policy gradient trains on: all that needs no gradient."""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .advantages import (
    Advantage,
    Outcomes,
    Refine,
    check_group,
    gae,
    group_statistics,
    whiten,
)
from .filters import Filter
from .losses import (
    Aggregate,
    Correction,
    Objective,
    check_objective,
    prompt_mean,
    sampler_gap,
)
from .mean import Metrics, Spans, masked_mean, mean_of, scalar_mean, select
from .models.containers import WithReference
from .models.critic import ActorCritic
from .models.decoder import Decoder
from .rollout.collect import Collect, Episodes, Grouped, Lay, Places, episode_metrics, to_rows
from .rollout.packing import padding_share
from .rollout.sample import LENGTH
from .rollout.score import score
from .types import LanguageModel, Rows, Scalar

# T_i of each token's episode → λ
Decay = Callable[[Float[Array, "b t"]], Float[Array, "b t"]]
# (rewards, values, spans, *, gamma, decay) → (advantages, returns): `gae`, `turn_gae`
Estimate = Callable[..., tuple[Float[Array, "b t"], Float[Array, "b t"]]]


class PolicyBatch(eqx.Module):
    """Episodes in rows. Log-probabilities in nats."""

    rows: Rows
    weights: Float[Array, "b e"]  # 1 for a scored episode, 0 for one that does not count
    advantages: Float[Array, "b t"]
    sampler_logps: Float[Array, "b t"]
    old_logps: Float[Array, "b t"] | None  # None: the policy's own, held constant
    ref_logps: Float[Array, "b t"] | None
    temperature: Float[Array, " b"]

    @property
    def spans(self) -> Spans:
        """Which tokens belong to which episode, and what each episode counts."""
        return Spans(self.rows.mask, self.rows.episode, self.weights)

    def held(self, logps: Float[Array, "b t"]) -> Float[Array, "b t"]:
        """log π_old: that of the rollout, or the policy's own, held constant."""
        return jax.lax.stop_gradient(logps) if self.old_logps is None else self.old_logps

    def surrogate(
        self, logps: Float[Array, "b t"], objective: Objective, correction: Correction | None
    ) -> tuple[Float[Array, "b t"], Metrics]:
        """The objective's losses of log π, times the correction's weights; and how far the sampler
        is.
        """
        old, spans = self.held(logps), self.spans
        losses, metrics = objective(logps, old, self.advantages, spans)
        if correction is not None:
            weights, more = correction(logps, old, self.sampler_logps, self.advantages, spans)
            losses, metrics = losses * weights, metrics | more
        return losses, metrics | sampler_gap(logps, self.sampler_logps, spans)


class ActorCriticBatch(eqx.Module):
    """Episodes in rows, and what the critic said of them."""

    policy: PolicyBatch
    values: Float[Array, "b t"]
    returns: Float[Array, "b t"]
    rewards: Float[Array, "b t"]  # the episode's, at each of its trained tokens


def check_lay(aggregate: Aggregate, lay: Lay) -> None:
    """Let an aggregation that takes a row for a whole group refuse rows of anything else."""
    if aggregate is prompt_mean and lay is not to_rows:
        raise ValueError("prompt_mean takes a row for a prompt's whole group; use lay=to_rows")


def check_parts(
    collect: Collect, advantage: Advantage, objective: Objective, aggregate: Aggregate, lay: Lay
) -> None:
    """Let the parts of a policy gradient raise what they have to before anything is run."""
    check_objective(objective)
    check_lay(aggregate, lay)
    if isinstance(collect, Grouped):
        check_group(advantage, collect.group)


def outcomes_of(episodes: Episodes) -> Outcomes:
    """How the episodes ended."""
    return Outcomes(
        rewards=episodes.rewards,
        group=episodes.group,
        lengths=episodes.mask.sum(1).astype(jnp.float32),
        truncated=episodes.finish == LENGTH,
        groups=episodes.prompts.tokens.shape[0],
        components=episodes.components,
        baselines=episodes.baselines,
        staleness=episodes.staleness,
        finish=episodes.finish,
        mask=episodes.mask,
        step_rewards=episodes.step_rewards,
    )


def annotate(
    models: WithReference[Decoder],
    episodes: Episodes,
    advantage: Advantage,
    *,
    lay: Lay = to_rows,
    refine: Refine | None = None,
    filters: Sequence[Filter] = (),
    old: bool = False,
    reference: bool = False,
) -> tuple[PolicyBatch, Metrics]:
    """Episodes in rows, with their advantages and the log-probabilities that the loss needs: the
    policy's of now (`old`) and the reference's. Error: no reference where one is needed.
    """
    if reference and models.reference is None:
        raise ValueError("beta ≠ 0 needs a reference; pass with_reference(policy)")
    laid = lay(episodes)
    return _annotate(models, episodes, laid, advantage, refine, tuple(filters), old, reference)


@eqx.filter_jit
def _annotate(
    models: WithReference[Decoder],
    episodes: Episodes,
    laid: tuple[Rows, Places],
    advantage: Advantage,
    refine: Refine | None,
    filters: Sequence[Filter],
    old: bool,
    reference: bool,
) -> tuple[PolicyBatch, Metrics]:
    """`annotate`, once the rows are laid."""
    rows, places = laid
    outcomes = outcomes_of(episodes)
    kept = outcomes.scored
    for keep in filters:
        kept &= keep(outcomes)
    counts = kept.astype(jnp.float32)
    if episodes.weights is not None:
        counts *= episodes.weights
    weights = places.per_episode(counts)
    spans = Spans(rows.mask, rows.episode, weights)
    temperature = places.per_row(episodes.temperature)

    def logps(model: LanguageModel) -> Float[Array, "b t"]:
        return score(model, rows, temperature=temperature).logps

    found = advantage(outcomes)
    if found.ndim == 2:
        advantages = select(spans.mask, places.per_token(found))
    else:
        advantages = spans.spread(places.per_episode(found))
    sampler_logps = places.per_token(episodes.logps)
    wanted = reference or refine is not None
    ref_logps = logps(models.reference) if wanted and models.reference else None
    if refine is not None:
        advantages = refine(advantages, sampler_logps, ref_logps, spans)
    batch = PolicyBatch(
        rows=rows,
        weights=weights,
        advantages=advantages,
        sampler_logps=sampler_logps,
        old_logps=logps(models.policy) if old else None,
        ref_logps=ref_logps,
        temperature=temperature,
    )
    spread = group_statistics(outcomes)
    differ = jax.ops.segment_max(
        spread.informative.astype(jnp.float32), outcomes.group, outcomes.groups
    )
    metrics = episode_metrics(episodes) | {
        "reward_std": masked_mean(spread.deviation, spread.count >= 2),
        "frac_reward_zero_std": mean_of(1.0 - differ),
        "padding_share": scalar_mean(padding_share(rows)),
    }
    if filters:
        dropped = 1.0 - kept.astype(jnp.float32)
        metrics["frac_filtered"] = masked_mean(dropped, outcomes.scored)
    return batch, metrics


@eqx.filter_jit
def judge(
    models: ActorCritic,
    batch: PolicyBatch,
    beta: Float[Array, ""],
    *,
    gamma: Scalar,
    decay: Decay,
    value_decay: Decay | None,
    estimate: Estimate = gae,
) -> ActorCriticBatch:
    """Values, advantages and returns of the episodes, where their tokens' rewards stand as
    advantages, less β·KL at each token.
    """
    spans = batch.spans
    rewards = select(spans.mask, batch.advantages)
    if batch.ref_logps is not None:
        rewards -= beta * (batch.sampler_logps - batch.ref_logps)
    (_, values), lengths = models.evaluate(batch.rows), spans.spread(spans.lengths)
    advantages, _ = estimate(rewards, values, spans, gamma=gamma, decay=decay(lengths))
    rates = (value_decay or decay)(lengths)
    _, returns = estimate(rewards, values, spans, gamma=gamma, decay=rates)
    white = whiten(advantages, spans.spread(spans.weights))
    policy = dataclasses.replace(batch, advantages=white)
    total = spans.spread(spans.sum(batch.advantages))
    return ActorCriticBatch(policy, values, returns, total)
