"""Advantages of completions against the others of their prompt's group.

All take (rewards [n], group [n], groups): one reward per episode, NaN where it could not be
scored, and the episode's group id, 0 ≤ id < groups. Unscored episodes leave the statistics and
get 0. Where fewer than two members are scored, or all scored rewards are equal, the advantages
are exactly 0, whatever rounding would leave.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .types import Scalar

Advantage = Callable[[Float[Array, " n"], Int[Array, " n"], int], Float[Array, " n"]]


class GroupStatistics(eqx.Module):
    """Of every episode's group, spread back to the episodes."""

    rewards: Float[Array, " n"]  # 0 where unscored
    count: Float[Array, " n"]  # scored members
    mean: Float[Array, " n"]
    deviation: Float[Array, " n"]  # √(Σ(r − mean)² / (count − ddof))
    informative: Bool[Array, " n"]  # this episode is scored, and the group's rewards differ


def group_statistics(
    rewards: Float[Array, " n"], group: Int[Array, " n"], groups: int, *, ddof: int = 1
) -> GroupStatistics:
    """Count, mean and deviation over the scored members of each group."""
    scored = jnp.isfinite(rewards)
    safe = jnp.where(scored, rewards, 0.0)
    total = lambda x: jax.ops.segment_sum(x, group, groups)[group]  # noqa: E731
    count = total(scored.astype(jnp.float32))
    mean = total(safe) / jnp.maximum(count, 1)
    squares = total(jnp.where(scored, (safe - mean) ** 2, 0.0))
    highest = jax.ops.segment_max(jnp.where(scored, rewards, -jnp.inf), group, groups)[group]
    lowest = jax.ops.segment_min(jnp.where(scored, rewards, jnp.inf), group, groups)[group]
    return GroupStatistics(
        rewards=safe,
        count=count,
        mean=mean,
        deviation=jnp.sqrt(squares / jnp.maximum(count - ddof, 1)),
        informative=scored & (count >= 2) & (highest > lowest),
    )


def group_normalized(
    rewards: Float[Array, " n"],
    group: Int[Array, " n"],
    groups: int,
    *,
    epsilon: Scalar = 1e-4,
    ddof: int = 1,
) -> Float[Array, " n"]:
    """(r − mean) / (std + ε). Source: Shao et al., DeepSeekMath, 2402.03300, §4.1.2.

    The paper gives neither ε nor the kind of deviation: TRL's 1e-4 and the sample deviation;
    verl's ε is 1e-6.
    """
    s = group_statistics(rewards, group, groups, ddof=ddof)
    return jnp.where(s.informative, (s.rewards - s.mean) / (s.deviation + epsilon), 0.0)


def group_centered(
    rewards: Float[Array, " n"], group: Int[Array, " n"], groups: int
) -> Float[Array, " n"]:
    """r − mean. Source: Liu et al., Dr.GRPO, 2503.20783, §3.2."""
    s = group_statistics(rewards, group, groups)
    return jnp.where(s.informative, s.rewards - s.mean, 0.0)


def leave_one_out(
    rewards: Float[Array, " n"], group: Int[Array, " n"], groups: int
) -> Float[Array, " n"]:
    """r − the mean of the others = (G r − Σ r)/(G − 1). Source: Ahmadian et al., RLOO,
    2402.14740, eq. 8.

    Error: groups of one, which leave nobody to compare with.
    """
    if rewards.shape[0] <= groups:
        raise ValueError(
            f"expected at least 2 completions of each prompt, got {rewards.shape[0]} of {groups}"
        )
    s = group_statistics(rewards, group, groups)
    others = s.count * (s.rewards - s.mean) / jnp.maximum(s.count - 1, 1)
    return jnp.where(s.informative, others, 0.0)
