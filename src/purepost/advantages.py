"""Advantages of episodes from how they ended, and of tokens from what followed them.

An `Advantage` gives a number for each of n episodes, or for each of their tokens (turns.py).
Unscored episodes (reward NaN) leave the statistics and get 0. Where it compares a group, and fewer
than two members are scored or all scored rewards are equal, it is exactly 0, whatever rounding
would leave.

A `Refine` turns the numbers of episodes, spread over their tokens, into numbers of tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .mean import Spans, select
from .types import Scalar


class Outcomes(eqx.Module):
    """How n episodes of the prompts' groups ended."""

    rewards: Float[Array, " n"]  # NaN: unscored
    group: Int[Array, " n"]  # 0 ≤ id < groups
    lengths: Float[Array, " n"]  # sampled tokens
    truncated: Bool[Array, " n"]  # ended by the limit on tokens
    groups: int = eqx.field(static=True)
    components: Float[Array, "n k"] | None = None  # the rewards that `rewards` is the sum of
    baselines: Float[Array, " n"] | None = None  # the reward of a rollout that is not trained on
    staleness: Int[Array, " n"] | None = None  # steps that the policy has trained since; None: 0
    finish: Int[Array, " n"] | None = None  # why each ended
    mask: Bool[Array, "n t"] | None = None  # the sampled tokens
    step_rewards: Float[Array, "n t"] | None = None  # where turns earned them

    @property
    def scored(self) -> Bool[Array, " n"]:
        """Which episodes have a reward."""
        return jnp.isfinite(self.rewards)


Advantage = Callable[[Outcomes], Float[Array, "n *t"]]
# (episodes' advantages at their tokens, sampler's logps, reference's logps, spans) → tokens'
Refine = Callable[
    [Float[Array, "b t"], Float[Array, "b t"], Float[Array, "b t"] | None, Spans],
    Float[Array, "b t"],
]


class GroupStatistics(eqx.Module):
    """Of every episode's group, spread back to the episodes."""

    rewards: Float[Array, " n"]  # 0 where unscored
    count: Float[Array, " n"]  # scored members
    mean: Float[Array, " n"]
    deviation: Float[Array, " n"]  # √(Σ(r − mean)² / (count − ddof))
    informative: Bool[Array, " n"]  # this episode is scored, and the group's rewards differ


def group_statistics(outcomes: Outcomes, *, ddof: int = 1) -> GroupStatistics:
    """Count, mean and deviation over the scored members of each group."""
    group, groups, scored = outcomes.group, outcomes.groups, outcomes.scored
    safe = jnp.where(scored, outcomes.rewards, 0.0)
    total = lambda x: jax.ops.segment_sum(x, group, groups)[group]  # noqa: E731
    count = total(scored.astype(jnp.float32))
    mean = total(safe) / jnp.maximum(count, 1)
    squares = total(jnp.where(scored, (safe - mean) ** 2, 0.0))
    highest = jax.ops.segment_max(jnp.where(scored, safe, -jnp.inf), group, groups)[group]
    lowest = jax.ops.segment_min(jnp.where(scored, safe, jnp.inf), group, groups)[group]
    return GroupStatistics(
        rewards=safe,
        count=count,
        mean=mean,
        deviation=jnp.sqrt(squares / jnp.maximum(count - ddof, 1)),
        informative=scored & (count >= 2) & (highest > lowest),
    )


def compared(outcomes: Outcomes, *, ddof: int = 1) -> GroupStatistics:
    """The statistics of groups whose members are compared. Error: groups of one."""
    n = outcomes.rewards.shape[0]
    if n <= outcomes.groups:
        raise ValueError(
            f"expected at least 2 completions of each prompt, got {n} of {outcomes.groups}; "
            "raise the collector's `group`"
        )
    return group_statistics(outcomes, ddof=ddof)


def check_group(advantage: Advantage, group: int) -> None:
    """Let an advantage that compares completions raise what it has to of groups of one."""
    if group == 1:
        one, first = jnp.zeros(1), jnp.zeros(1, jnp.int32)
        column = one[:, None]
        alone = Outcomes(one, first, one, one > 0, 1, column, one, first, first, column > 0, column)
        jax.eval_shape(advantage, alone)


def uncompared(outcomes: Outcomes) -> Float[Array, " n"]:
    """r: no baseline. Source: Williams, Simple statistical gradient-following algorithms, 1992."""
    return jnp.where(outcomes.scored, outcomes.rewards, 0.0)


def group_normalized(
    outcomes: Outcomes, *, epsilon: Scalar = 1e-4, ddof: int = 1
) -> Float[Array, " n"]:
    """(r − mean) / (std + ε). Source: Shao et al., DeepSeekMath, 2402.03300, §4.1.2.

    The paper gives neither ε nor the kind of deviation: TRL's 1e-4 and the sample deviation;
    verl's ε is 1e-6.
    """
    s = compared(outcomes, ddof=ddof)
    return jnp.where(s.informative, (s.rewards - s.mean) / (s.deviation + epsilon), 0.0)


def group_centered(outcomes: Outcomes) -> Float[Array, " n"]:
    """r − mean. Source: Liu et al., Dr.GRPO, 2503.20783, §3.2."""
    s = compared(outcomes)
    return jnp.where(s.informative, s.rewards - s.mean, 0.0)


def batch_scaled(outcomes: Outcomes, *, epsilon: Scalar = 1e-4) -> Float[Array, " n"]:
    """(r − mean of the group) / (std of the batch + ε). Source: Liu et al., Tricks or traps,
    2508.08221.
    """
    scored = outcomes.scored.astype(jnp.float32)
    safe = uncompared(outcomes)
    mean = (scored * safe).sum() / jnp.maximum(scored.sum(), 1)
    variance = (scored * (safe - mean) ** 2).sum() / jnp.maximum(scored.sum() - 1, 1)
    return group_centered(outcomes) / (jnp.sqrt(variance) + epsilon)


def leave_one_out(outcomes: Outcomes) -> Float[Array, " n"]:
    """r − the mean of the others = (G r − Σ r)/(G − 1). Source: Ahmadian et al., RLOO,
    2402.14740, eq. 8.
    """
    s = compared(outcomes)
    others = s.count * (s.rewards - s.mean) / jnp.maximum(s.count - 1, 1)
    return jnp.where(s.informative, others, 0.0)


def length_weighted(outcomes: Outcomes) -> Float[Array, " n"]:
    """r − Σ len·r / Σ len over the group: the baseline of least variance where a gradient grows
    with its length. Source: Hao et al., OPO, 2505.23585.
    """
    s = compared(outcomes)
    lengths = jnp.where(outcomes.scored, outcomes.lengths, 0.0)
    total = lambda x: jax.ops.segment_sum(x, outcomes.group, outcomes.groups)  # noqa: E731
    baseline = total(lengths * s.rewards) / jnp.maximum(total(lengths), 1.0)
    return jnp.where(s.informative, s.rewards - baseline[outcomes.group], 0.0)


def mean_normalized(outcomes: Outcomes) -> Float[Array, " n"]:
    """(r − mean)/mean, 0 where the mean is not positive. Source: Tajwar et al., Maximum likelihood
    RL, 2602.02710.
    """
    s = compared(outcomes)
    usable = s.informative & (s.mean > 0)
    return jnp.where(usable, (s.rewards - s.mean) / jnp.where(usable, s.mean, 1.0), 0.0)


def best_of_group(outcomes: Outcomes, *, epsilon: Scalar | None = None) -> Float[Array, " n"]:
    """Highest − second highest reward for the best of the group, 0 for the others (and for all
    where two are best); with `epsilon` over std + ε of the group.

    Source: Tang et al., Inference time objectives, 2503.19595.
    """
    s = compared(outcomes)
    ranked = jnp.where(outcomes.scored, s.rewards, -jnp.inf)
    same = outcomes.group[:, None] == outcomes.group
    others = jnp.where(same & ~jnp.eye(ranked.size, dtype=bool), ranked, -jnp.inf).max(1)
    best = s.informative & (ranked > others)
    ahead = jnp.where(best, s.rewards - jnp.where(best, others, 0.0), 0.0)
    return ahead if epsilon is None else ahead / (s.deviation + epsilon)


def over_baseline(outcomes: Outcomes) -> Float[Array, " n"]:
    """r − r of the rollout kept as the baseline. Source: Li et al., ReMax, 2310.10505.

    Error: no such rollout.
    """
    if outcomes.baselines is None:
        raise ValueError("expected episodes with baselines, got none; collect them with `remax`")
    usable = outcomes.scored & jnp.isfinite(outcomes.baselines)
    return jnp.where(usable, outcomes.rewards - outcomes.baselines, 0.0)


def decoupled(
    outcomes: Outcomes, *, weights: Sequence[Scalar] | None = None, epsilon: Scalar = 1e-4
) -> Float[Array, " n"]:
    """Each of k rewards normalised in its group, added up by `weights` (1 by default), and the
    sums whitened over the batch. Source: Liu et al., GDPO, 2601.05242.

    Errors: episodes with one reward only, another number of weights.
    """
    compared(outcomes)
    if outcomes.components is None:
        raise ValueError("expected several rewards, got one; let the reward return [p, g, k]")
    k = outcomes.components.shape[1]
    weights = [1.0] * k if weights is None else weights
    if len(weights) != k:
        raise ValueError(f"expected {k} weights, one per reward, got {len(weights)}")

    def alone(rewards: Float[Array, " n"]) -> Float[Array, " n"]:
        return group_normalized(dataclasses.replace(outcomes, rewards=rewards), epsilon=epsilon)

    parts = jax.vmap(alone, in_axes=1, out_axes=1)(outcomes.components)
    total = parts @ jnp.stack([jnp.asarray(w, jnp.float32) for w in weights])
    white = whiten(total, outcomes.scored.astype(jnp.float32))
    return jnp.where(outcomes.scored & (parts != 0).any(1), white, 0.0)


def group_whitened(outcomes: Outcomes) -> Float[Array, " n"]:
    """r − mean of the group, whitened over the batch's tokens. Source: Hu et al., REINFORCE++,
    2501.03262.
    """
    s = compared(outcomes)
    weights = jnp.where(outcomes.scored, outcomes.lengths, 0.0)
    return jnp.where(s.informative, whiten(group_centered(outcomes), weights), 0.0)


def whiten(x: Float[Array, "*s"], weights: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """(x − mean)/√(variance + 1e-8) where the weight is positive, else 0: exactly 0 everywhere if
    those x are equal. A weight counts how often its entry is there.
    """
    there = weights > 0
    x, count = select(there, x), weights.sum()
    mean = (weights * x).sum() / jnp.maximum(count, 1)
    variance = (weights * (x - mean) ** 2).sum() / jnp.maximum(count - 1, 1)
    differ = jnp.where(there, x, -jnp.inf).max() > jnp.where(there, x, jnp.inf).min()
    return jnp.where(there & differ, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)


def at_last_token(x: Float[Array, "b t"], spans: Spans) -> Float[Array, "b t"]:
    """What stands at an episode's last trained token stays, all else is 0: where a reward is."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    episodes = jnp.arange(spans.weights.shape[1], dtype=spans.episode.dtype)
    mine = spans.mask[:, :, None] & (spans.episode[:, :, None] == episodes)
    last = jnp.where(mine, index[:, None], -1).max(1)
    return select(jnp.take_along_axis(last, spans.episode, 1) == index, x)


def gae(
    rewards: Float[Array, "b t"],
    values: Float[Array, "b t"],
    spans: Spans,
    *,
    gamma: Scalar | Float[Array, "b t"] = 1.0,
    decay: Scalar | Float[Array, "b t"] = 0.95,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """(advantages, returns): δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}, R = A + V, where
    t+1 is the episode's next trained token; λ is `decay`.

    The tokens of an episode stand together in a row; what is not trained between them is passed
    over. Source: Schulman et al., GAE, 1506.02438, eq. 16.
    """
    rewards, values = select(spans.mask, rewards), select(spans.mask, values)
    rates = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), rewards.shape) for x in (gamma, decay))
    columns = (rewards, values, spans.mask, spans.episode, *rates)

    def back(
        after: tuple[Array, Array, Array], now: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        reward, value, trained, episode, gamma, rate = now
        same = after[2] == episode
        next_value, next_advantage = (jnp.where(same, x, 0.0) for x in after[:2])
        advantage = reward + gamma * next_value - value + gamma * rate * next_advantage
        new = (value, advantage, episode)
        return jax.tree.map(lambda a, b: jnp.where(trained, a, b), new, after), advantage

    start = (jnp.zeros(rewards.shape[0]), jnp.zeros(rewards.shape[0]), -spans.episode[:, 0] - 1)
    _, advantages = jax.lax.scan(back, start, jax.tree.map(jnp.transpose, columns), reverse=True)
    advantages = select(spans.mask, advantages.T)
    return advantages, advantages + values


def penalized(
    advantages: Float[Array, "b t"],
    sampler_logps: Float[Array, "b t"],
    ref_logps: Float[Array, "b t"] | None,
    spans: Spans,
    *,
    penalty: Scalar = 0.0,
    gamma: Scalar = 1.0,
) -> Float[Array, "b t"]:
    """What follows a token: Σ_{s ≥ t} γ^{s−t} r_s, whitened over the batch's tokens, where r is
    the episode's advantage at its last token less `penalty`·(log π_sampler − log π_ref) at each.

    Source: Hu et al., REINFORCE++, 2501.03262. Error: a penalty without a reference.
    """
    rewards = at_last_token(advantages, spans)
    if ref_logps is not None:
        rewards -= penalty * (select(spans.mask, sampler_logps) - select(spans.mask, ref_logps))
    elif not eqx.is_array(penalty) and penalty != 0:
        raise ValueError("a penalty ≠ 0 needs a reference; pass with_reference(policy)")
    _, returns = gae(rewards, jnp.zeros(rewards.shape), spans, gamma=gamma, decay=1.0)
    return whiten(returns, spans.spread(spans.weights))
