"""Credit by turns against NumPy twins that walk through the turns one by one."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.advantages import Outcomes, gae, group_normalized
from purepost.filters import ended_by
from purepost.mean import Spans
from purepost.rollout.environment import ERROR, MAX_TURNS
from purepost.rollout.sample import LENGTH, STOP
from purepost.turns import (
    token_rewards,
    turn_ends,
    turn_gae,
    turn_index,
    turn_normalized,
    turn_returns,
)

T = 9


def outcomes(
    mask: np.ndarray, step_rewards: np.ndarray | None, rewards: list[float], groups: int = 1
) -> Outcomes:
    n = len(mask)
    return Outcomes(
        rewards=jnp.asarray(rewards, jnp.float32),
        group=jnp.asarray(np.arange(n) * groups // n, jnp.int32),
        lengths=jnp.asarray(mask.sum(1), jnp.float32),
        truncated=jnp.zeros(n, bool),
        groups=groups,
        finish=jnp.asarray([STOP, LENGTH, ERROR, MAX_TURNS][:n], jnp.int32),
        mask=jnp.asarray(mask),
        step_rewards=None if step_rewards is None else jnp.asarray(step_rewards, jnp.float32),
    )


def runs(row: np.ndarray) -> list[list[int]]:
    """The places of each turn's tokens."""
    found: list[list[int]] = []
    for i, sampled in enumerate(row):
        if sampled and (i == 0 or not row[i - 1]):
            found.append([])
        if sampled:
            found[-1].append(i)
    return found


masks = st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=3, max_size=3).map(
    np.array
)


@given(masks)
def test_turns_are_runs_of_sampled_tokens(mask: np.ndarray) -> None:
    index, ends = (
        np.asarray(turn_index(jnp.asarray(mask))),
        np.asarray(turn_ends(jnp.asarray(mask))),
    )
    for row in range(len(mask)):
        for k, places in enumerate(runs(mask[row])):
            assert index[row, places].tolist() == [k] * len(places)
            assert ends[row, places].tolist() == [False] * (len(places) - 1) + [True]
    assert not ends[~mask].any()


@given(masks, st.floats(0, 1))
def test_returns_are_discounted_by_turns(mask: np.ndarray, gamma: float) -> None:
    rewards = np.random.default_rng(0).normal(size=mask.shape) * np.asarray(
        turn_ends(jnp.asarray(mask))
    )
    found = turn_returns(outcomes(mask, rewards, [0.0] * 3), gamma=gamma)
    expected = np.zeros(mask.shape)
    for row in range(len(mask)):
        after = 0.0
        for places in reversed(runs(mask[row])):
            after = rewards[row, places[-1]] + gamma * after
            expected[row, places] = after
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@given(masks, st.floats(0, 1), st.floats(0, 1))
def test_gae_over_turns(mask: np.ndarray, gamma: float, decay: float) -> None:
    """The first token of a turn has the advantage that GAE gives when turns are the steps of time
    and the states in which they begin have the critic's values there.
    """
    rng = np.random.default_rng(1)
    values = rng.normal(size=mask.shape)
    rewards = rng.normal(size=mask.shape) * np.asarray(turn_ends(jnp.asarray(mask)))
    spans = Spans(jnp.asarray(mask), jnp.zeros(mask.shape, jnp.int32), jnp.ones((3, 1)))
    advantages, returns = turn_gae(
        jnp.asarray(rewards, jnp.float32),
        jnp.asarray(values, jnp.float32),
        spans,
        gamma=gamma,
        decay=decay,
    )
    for row in range(len(mask)):
        next_value = following = 0.0
        for places in reversed(runs(mask[row])):
            first = places[0]
            delta = rewards[row, places[-1]] + gamma * next_value - values[row, first]
            following = delta + gamma * decay * following
            next_value = values[row, first]
            np.testing.assert_allclose(advantages[row, first], following, rtol=1e-4, atol=1e-5)
            # Within a turn only the value compared with differs.
            np.testing.assert_allclose(
                returns[row, places], following + values[row, first], rtol=1e-4, atol=1e-5
            )


def test_gae_over_turns_of_one_token_is_gae() -> None:
    mask = np.array([[True, False, True, False, True]])
    spans = Spans(jnp.asarray(mask), jnp.zeros((1, 5), jnp.int32), jnp.ones((1, 1)))
    rewards, values = jnp.asarray([[1.0, 0, 2, 0, 3]]), jnp.asarray([[0.5, 0, 0.1, 0, 0.2]])
    one, two = (f(rewards, values, spans, gamma=0.9, decay=0.8) for f in (gae, turn_gae))
    np.testing.assert_allclose(one, two, rtol=1e-6)


MASK = np.array([[1, 1, 0, 1, 1], [1, 0, 1, 0, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0]], bool)
STEPS = np.array([[0, 1, 0, 0, 4], [3, 0, 2, 0, 0], [0, 5, 0, 0, 0], [9, 0, 0, 9, 0]], np.float32)


def test_turns_are_compared_with_the_groups_same_turn() -> None:
    """Returns of turn 0: 5, 5, 5 and an unscored one: equal, so 0. Of turn 1: 4 and 2, mean 3,
    deviation √2. Turn 2 was reached by one alone.
    """
    known = outcomes(MASK, STEPS, [5.0, 5.0, 5.0, np.nan])
    found = np.asarray(turn_normalized(epsilon=0.0)(known))
    root = np.sqrt(0.5)
    expected = [[0, 0, 0, root, root], [0, 0, -root, 0, 0], [0] * 5, [0] * 5]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    halved = np.asarray(turn_normalized(gamma=0.5)(known))
    returns = np.array([1 + 2, 3 + 1, 5])
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(halved[:3, 0], expected, rtol=1e-5)
    assert not halved[3].any()


def test_episodes_of_one_turn_are_compared_as_grpo_does() -> None:
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    known = outcomes(mask, None, [1.0, 0.0, 3.0, 2.0], groups=2)
    found = np.asarray(turn_normalized()(known))
    expected = np.asarray(group_normalized(known))[:, None] * mask
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    rewards = np.asarray(token_rewards(known))
    assert rewards.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 3], [0, 2, 0]]


def test_rewards_stand_where_they_were_earned() -> None:
    known = outcomes(MASK, STEPS, [5.0, 5.0, 5.0, np.nan])
    np.testing.assert_array_equal(token_rewards(known), STEPS * [[1], [1], [1], [0]])
    bare = Outcomes(jnp.zeros(2), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2, bool), 1)
    with pytest.raises(ValueError, match="mask of what was sampled"):
        token_rewards(bare)
    with pytest.raises(ValueError, match="how they ended"):
        ended_by(STOP)(bare)


def test_filters_read_why_an_episode_ended() -> None:
    known = outcomes(MASK, STEPS, [0.0] * 4)
    assert ended_by(STOP, MAX_TURNS)(known).tolist() == [True, False, False, True]
    assert ended_by()(known).tolist() == [False] * 4
