"""Credit turn by turn: rewards where they were earned, returns from each turn on, GAE over turns.

A turn is a run of sampled tokens; what nothing stands between counts as one.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .advantages import Advantage, Outcomes, gae, group_statistics
from .mean import Spans, select
from .types import Scalar


def turn_index(mask: Bool[Array, "n t"]) -> Int[Array, "n t"]:
    """The number of each sampled token's turn in its row, from 0."""
    before = jnp.pad(mask[:, :-1], [(0, 0), (1, 0)])
    return jnp.maximum(jnp.cumsum(mask & ~before, 1, dtype=jnp.int32) - 1, 0)


def turn_ends(mask: Bool[Array, "n t"]) -> Bool[Array, "n t"]:
    """The last token of each turn."""
    return mask & ~jnp.pad(mask[:, 1:], [(0, 0), (0, 1)])


def token_rewards(outcomes: Outcomes) -> Float[Array, "n t"]:
    """Rewards where they were earned: of episodes of one turn, at their last sampled token."""
    mask = _sampled(outcomes)
    if outcomes.step_rewards is not None:
        there = mask & outcomes.scored[:, None]
        return select(there, outcomes.step_rewards)
    t = mask.shape[1]
    last = t - 1 - jnp.argmax(mask[:, ::-1], 1)
    there = mask & (jnp.arange(t) == last[:, None]) & outcomes.scored[:, None]
    return select(there, jnp.broadcast_to(outcomes.rewards[:, None], mask.shape))


def turn_returns(outcomes: Outcomes, *, gamma: Scalar = 1.0) -> Float[Array, "n t"]:
    """G_k = Σ_{j ≥ k} γ^{j−k} r_j at every token of turn k: no baseline."""
    rewards, mask = token_rewards(outcomes), _sampled(outcomes)
    spans = Spans(mask, jnp.zeros(mask.shape, jnp.int32), jnp.ones((mask.shape[0], 1)))
    return turn_gae(rewards, jnp.zeros(rewards.shape), spans, gamma=gamma, decay=1.0)[0]


def turn_normalized(*, gamma: Scalar = 1.0, epsilon: Scalar = 1e-4) -> Advantage:
    """(G_k − mean)/(std + ε) over the group's episodes that reached turn k; 0 where they are fewer
    than two or all returns are equal.

    Source: Zeng et al., Reinforcing multi-turn reasoning in LLM agents via turn-level credit
    assignment, 2505.11821. Differs: G_k is all that follows the turn, discounted.
    """
    return partial(_turn_normalized, gamma=gamma, epsilon=epsilon)


def _turn_normalized(outcomes: Outcomes, *, gamma: Scalar, epsilon: Scalar) -> Float[Array, "n t"]:
    returns, mask = turn_returns(outcomes, gamma=gamma), _sampled(outcomes)
    t, ends = mask.shape[1], turn_ends(mask)
    counted = ends & outcomes.scored[:, None]
    every = outcomes.group[:, None] * t + turn_index(mask)
    s = group_statistics(
        Outcomes(
            rewards=jnp.where(counted, returns, jnp.nan).reshape(-1),
            group=every.reshape(-1),
            lengths=counted.astype(jnp.float32).reshape(-1),
            truncated=jnp.zeros(mask.size, bool),
            groups=outcomes.groups * t,
        )
    )
    found = jnp.where(s.informative, (s.rewards - s.mean) / (s.deviation + epsilon), 0.0)
    index = jnp.where(ends, jnp.arange(t, dtype=jnp.int32), t - 1)
    end = jax.lax.cummin(index, axis=1, reverse=True)  # of the token's turn
    return select(mask, jnp.take_along_axis(found.reshape(mask.shape), end, 1))


def turn_gae(
    rewards: Float[Array, "b t"],
    values: Float[Array, "b t"],
    spans: Spans,
    *,
    gamma: Scalar = 1.0,
    decay: Scalar | Float[Array, "b t"] = 0.95,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """(advantages, returns): `gae` with a turn for a step of time. γ and λ count at the end of a
    turn; within one they are 1, so that its first token has A_k = Σ_{j ≥ k} (γλ)^{j−k} δ_j of
    turns, and each token compares with its own value. For PPO's `estimate`.

    Source: Schulman et al., GAE, 1506.02438, eq. 16.
    """
    ends = turn_ends(spans.mask)
    return gae(
        rewards,
        values,
        spans,
        gamma=jnp.where(ends, jnp.asarray(gamma, jnp.float32), 1.0),
        decay=jnp.where(ends, jnp.asarray(decay, jnp.float32), 1.0),
    )


def _sampled(outcomes: Outcomes) -> Bool[Array, "n t"]:
    if outcomes.mask is None:
        raise ValueError("expected outcomes with the mask of what was sampled, got none; give it")
    return outcomes.mask
