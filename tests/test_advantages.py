"""Advantages: worked values, a float64 twin, unscored rewards, groups in any order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.advantages import (
    Advantage,
    Outcomes,
    at_last_token,
    batch_scaled,
    best_of_group,
    decoupled,
    gae,
    group_centered,
    group_normalized,
    group_statistics,
    group_whitened,
    leave_one_out,
    length_weighted,
    mean_normalized,
    over_baseline,
    penalized,
    uncompared,
    whiten,
)
from purepost.filters import at_most, finished, fresh, informative
from purepost.mean import Spans

NAN = float("nan")
EVERY: dict[str, Advantage] = {
    "group_normalized": group_normalized,
    "group_centered": group_centered,
    "batch_scaled": batch_scaled,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
    "mean_normalized": mean_normalized,
    "best_of_group": best_of_group,
    "group_whitened": group_whitened,
}
every = pytest.mark.parametrize("name", EVERY)


def outcomes(rewards, group=None, groups: int = 1, **fields) -> Outcomes:
    """Outcomes of rewards; one group and lengths of 2 unless said."""
    n = len(rewards)
    group = np.zeros(n) if group is None else group
    return Outcomes(
        rewards=jnp.asarray(rewards, jnp.float32),
        group=jnp.asarray(group, jnp.int32),
        lengths=jnp.asarray(fields.pop("lengths", [2.0] * n), jnp.float32),
        truncated=jnp.asarray(fields.pop("truncated", [False] * n)),
        groups=groups,
        **{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()},
    )


def of(advantage: Advantage, rewards, group=None, groups: int = 1, **fields) -> np.ndarray:
    """Advantages as an array."""
    return np.asarray(advantage(outcomes(rewards, group, groups, **fields)))


def spread_of(values: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean and sample deviation of values that are there so many times."""
    every = np.repeat(values, counts.astype(int))
    return float(every.mean()), float(every.std(ddof=1))


def twin(name: str, rewards: np.ndarray, group: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """From the formulas, in float64, one group after the other."""
    out = np.zeros(len(rewards))
    scored = np.isfinite(rewards)
    informative = np.zeros(len(rewards), bool)
    for g in set(group.tolist()):
        mine = (group == g) & scored
        r, n = rewards[mine].astype(np.float64), lengths[mine].astype(np.float64)
        if len(r) < 2 or r.max() == r.min():
            continue
        informative |= mine
        first, second = np.sort(r)[::-1][:2]
        out[mine] = {
            "group_normalized": (r - r.mean()) / (r.std(ddof=1) + 1e-4),
            "leave_one_out": (len(r) * r - r.sum()) / (len(r) - 1),
            "length_weighted": r - (n * r).sum() / n.sum(),
            "mean_normalized": (r - r.mean()) / (r.mean() or 1) if r.mean() > 0 else 0 * r,
            "best_of_group": np.where(r == first, first - second, 0),
        }.get(name, r - r.mean())
    if name == "batch_scaled" and scored.sum() > 1:
        out /= rewards[scored].astype(np.float64).std(ddof=1) + 1e-4
    if name == "group_whitened" and informative.any():
        mean, deviation = spread_of(out[scored], lengths[scored])
        out = np.where(informative, (out - mean) / deviation, 0)
    return out


@every
@given(seed=st.integers(0, 2**32 - 1))
def test_float64_twin_with_groups_in_any_order_and_unscored_rewards(name, seed):
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(3), 4))
    rewards = rng.integers(0, 5, 12).astype(np.float32) / 4
    rewards[rng.random(12) < 0.25] = np.nan
    lengths = rng.integers(1, 9, 12)
    got = of(EVERY[name], rewards, group, 3, lengths=lengths)
    np.testing.assert_allclose(got, twin(name, rewards, group, lengths), rtol=1e-4, atol=1e-5)


@every
@given(seed=st.integers(0, 2**32 - 1))
def test_a_permutation_moves_advantages_with_their_episodes(name, seed):
    rng = np.random.default_rng(seed)
    group, rewards = np.repeat(np.arange(3), 4), rng.normal(size=12).astype(np.float32)
    order = rng.permutation(12)
    ordered = of(EVERY[name], rewards, group, 3)
    np.testing.assert_allclose(
        of(EVERY[name], rewards[order], group[order], 3), ordered[order], rtol=1e-5, atol=1e-6
    )


def test_leave_one_out_values():
    np.testing.assert_allclose(
        of(leave_one_out, [1, 0, 0, 1]), [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-5
    )


@every
def test_groups_of_one_are_an_error(name):
    with pytest.raises(ValueError, match="at least 2 completions of each prompt, got 3 of 3"):
        of(EVERY[name], [1, 2, 3], [0, 1, 2], 3)


def test_group_centered_values():
    np.testing.assert_allclose(of(group_centered, [1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_give_exactly_0_whatever_rounding_leaves(epsilon, ddof):
    """Eight rewards of .7: their float32 deviation is not 0, so the formula alone is far off."""
    advantage = functools.partial(group_normalized, epsilon=epsilon, ddof=ddof)
    assert (of(advantage, [0.7] * 8) == 0).all()
    assert (of(jax.jit(advantage), [0.7] * 8) == 0).all()


@every
def test_two_groups_of_equal_rewards_are_all_0_in_mixed_order(name):
    """A0, B0, A1, B1 with A's rewards 0 and B's 1: by position the groups would differ."""
    assert (of(EVERY[name], [0, 1, 0, 1], [0, 1, 0, 1], 2) == 0).all()


def test_an_unscored_reward_leaves_the_statistics():
    """Totals [2, 0, unscored, 1]: mean 1 over three."""
    got = of(group_normalized, [2, 0, NAN, 1])
    np.testing.assert_allclose(got, [0.9999, -0.9999, 0, 0], atol=1e-6)
    assert got[2] == 0
    np.testing.assert_allclose(of(group_centered, [2, 0, NAN, 1]), [1, -1, 0, 0])
    np.testing.assert_allclose(of(leave_one_out, [2, 0, NAN, 1]), [1.5, -1.5, 0, 0])


@every
@pytest.mark.parametrize("rewards", [[NAN] * 4, [NAN, 3, NAN, NAN], [np.inf, 1, -np.inf, NAN]])
def test_fewer_than_two_scored_are_exactly_0(name, rewards):
    assert (of(EVERY[name], rewards) == 0).all()


def test_statistics():
    o = outcomes([2.0, 0.0, NAN, 1.0, 5.0, 5.0], [0, 0, 0, 0, 1, 1], 2)
    s = group_statistics(o)
    np.testing.assert_array_equal(s.rewards, [2, 0, 0, 1, 5, 5])
    np.testing.assert_array_equal(s.count, [3, 3, 3, 3, 2, 2])
    np.testing.assert_allclose(s.mean, [1, 1, 1, 1, 5, 5])
    np.testing.assert_allclose(s.deviation, [1, 1, 1, 1, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(s.informative, [1, 1, 0, 1, 0, 0])
    biased = group_statistics(o, ddof=0)
    np.testing.assert_allclose(biased.deviation[0], np.sqrt(2 / 3), rtol=1e-6)


def test_epsilon_may_be_an_array():
    """So that a sweep is a vmap."""
    o = outcomes([2.0, 0.0, 1.0])
    sweep = jax.vmap(lambda e: group_normalized(o, epsilon=e))
    got = sweep(jnp.asarray([1e-4, 1.0]))
    np.testing.assert_allclose(got, [[0.9999, -0.9999, 0], [0.5, -0.5, 0]], atol=1e-6)


def test_worked_values():
    np.testing.assert_allclose(of(uncompared, [1, NAN, 3]), [1, 0, 3])
    np.testing.assert_allclose(of(length_weighted, [1, 0], lengths=[3, 1]), [0.25, -0.75])
    np.testing.assert_allclose(of(mean_normalized, [1, 0, 0, 0]), [3, -1, -1, -1])
    np.testing.assert_allclose(of(mean_normalized, [-1, 0, 0, 0]), [0] * 4)
    np.testing.assert_allclose(of(best_of_group, [0.2, 0.9, 0.5, NAN]), [0, 0.4, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(of(best_of_group, [1, 1, 0, 0]), [0] * 4)
    scaled = of(functools.partial(best_of_group, epsilon=0.1), [0.2, 0.9, 0.5])
    deviation = float(np.std([0.2, 0.9, 0.5], ddof=1))
    np.testing.assert_allclose(scaled, [0, 0.4 / (deviation + 0.1), 0], rtol=1e-5)


def test_the_baseline_of_another_rollout():
    got = of(over_baseline, [1, 0, NAN, 1], baselines=[0.5, 0.5, 0.5, NAN])
    np.testing.assert_allclose(got, [0.5, -0.5, 0, 0])
    with pytest.raises(ValueError, match="baselines, got none"):
        of(over_baseline, [1, 0])


def test_rewards_normalised_apart_count_the_same_whatever_their_scales():
    """Two rewards at odds, the second a thousand times the first, which counts twice."""
    components = np.asarray([[1, 0], [0, 1000], [1, 0], [0, 1000]], float)
    twice = functools.partial(decoupled, weights=(2.0, 1.0))
    got = of(twice, components.sum(1), components=components)
    np.testing.assert_allclose(got, np.sqrt(3 / 4) * np.asarray([1, -1, 1, -1]), rtol=1e-4)


def test_a_reward_that_abstains_leaves_its_own_statistics():
    components = np.asarray([[1, 0], [0, 1], [NAN, 0], [0, 3]])
    got = of(decoupled, np.nansum(components, 1), components=components)
    a = np.asarray([2 / 3, -1 / 3, 0, -1 / 3]) / np.std([1, 0, 0], ddof=1)
    b = np.asarray([-1, 0, -1, 2]) / np.std([0, 1, 0, 3], ddof=1)
    total = a + b
    np.testing.assert_allclose(got, (total - total.mean()) / total.std(ddof=1), rtol=1e-3)


def test_decoupled_says_what_is_missing():
    with pytest.raises(ValueError, match="several rewards, got one"):
        of(decoupled, [1, 0])
    with pytest.raises(ValueError, match="expected 2 weights, one per reward, got 1"):
        of(functools.partial(decoupled, weights=(1.0,)), [1, 0], components=[[1, 0], [0, 1]])


def test_whitened_equal_values_are_0_and_nothing_else_reaches_them():
    x, weights = jnp.asarray([0.7, 0.7, NAN]), jnp.asarray([1.0, 5.0, 0.0])
    np.testing.assert_array_equal(whiten(x, weights), [0, 0, 0])
    x = jnp.asarray([1.0, 2.0, NAN])
    mean, deviation = spread_of(np.asarray([1, 2]), np.asarray([1, 5]))
    np.testing.assert_allclose(
        whiten(x, weights), [(1 - mean) / deviation, (2 - mean) / deviation, 0], rtol=1e-5
    )


# Actions a1 a2 [tool tool] a3 after a prompt of one token, and a second episode behind it.
MASK = [[0, 1, 1, 0, 0, 1, 1, 1]]
TWO = Spans(
    jnp.asarray(MASK, bool), jnp.asarray([[0, 0, 0, 0, 0, 0, 1, 1]], jnp.int32), jnp.ones((1, 2))
)


def test_gae_passes_over_tool_tokens_and_ends_at_the_episode():
    """Terminal reward 1, V = .5 on actions and 9 on tools, γ 1, λ .5."""
    values = jnp.asarray([[9, 0.5, 0.5, 9, 9, 0.5, 0.25, 0.25]], jnp.float32)
    rewards = at_last_token(jnp.where(TWO.mask, 1.0, NAN), TWO)
    np.testing.assert_array_equal(rewards, [[0, 0, 0, 0, 0, 1, 0, 1]])
    advantages, returns = gae(rewards, values, TWO, decay=0.5)
    np.testing.assert_allclose(advantages, [[0, 0.125, 0.25, 0, 0, 0.5, 0.375, 0.75]])
    np.testing.assert_allclose(returns, [[0, 0.625, 0.75, 0, 0, 1, 0.625, 1]])


@given(seed=st.integers(0, 2**32 - 1))
def test_gae_twin(seed):
    rng = np.random.default_rng(seed)
    mask, episode = rng.random((3, 8)) < 0.7, np.repeat([[0] * 4 + [1] * 4], 3, 0)
    rewards, values = rng.normal(size=(3, 8)), rng.normal(size=(3, 8))
    gamma, decay = 0.9, 0.8
    expected = np.zeros((3, 8))
    for row in range(3):
        for e in range(2):
            value = advantage = 0.0
            for t in reversed(np.flatnonzero(mask[row] & (episode[row] == e))):
                delta = rewards[row, t] + gamma * value - values[row, t]
                value, advantage = values[row, t], delta + gamma * decay * advantage
                expected[row, t] = advantage
    spans = Spans(jnp.asarray(mask), jnp.asarray(episode, jnp.int32), jnp.ones((3, 2)))
    fill = lambda x: jnp.asarray(np.where(mask, x, NAN), jnp.float32)  # noqa: E731
    got, returns = gae(fill(rewards), fill(values), spans, gamma=gamma, decay=decay)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), rtol=1e-4, atol=1e-5)


def test_penalized_returns_are_whitened():
    """Rewards 2 and 1, penalty .5 of log-ratios [.2, .4, .6] and [1, −1]."""
    advantages = jnp.asarray([[NAN, 2, 2, NAN, NAN, 2, 1, 1]])
    ref = jnp.asarray([[NAN, -0.2, -0.4, NAN, NAN, -0.6, -1, 1]])
    got = penalized(advantages, jnp.zeros((1, 8)), ref, TWO, penalty=0.5)
    returns = np.asarray([2 - 0.6, 2 - 0.5, 2 - 0.3, 1, 1 + 0.5])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(got[0][np.asarray(MASK[0]) == 1], expected, rtol=1e-4)
    assert (np.asarray(got)[~np.asarray(TWO.mask)] == 0).all()
    with pytest.raises(ValueError, match="a penalty ≠ 0 needs a reference"):
        penalized(advantages, jnp.zeros((1, 8)), None, TWO, penalty=0.5)


def test_filters():
    o = outcomes([1, 0, 2, 2], [0, 0, 1, 1], 2, truncated=[True, False, False, True])
    np.testing.assert_array_equal(finished(o), [0, 1, 1, 0])
    np.testing.assert_array_equal(informative(o), [1, 1, 0, 0])
    o = outcomes([1, 0], lengths=[3, 4])
    np.testing.assert_array_equal(at_most(3)(o), [1, 0])
    np.testing.assert_array_equal(fresh(0)(o), [1, 1])
    aged = dataclasses.replace(o, staleness=jnp.asarray([2, 3], jnp.int32))
    np.testing.assert_array_equal(fresh(2)(aged), [1, 0])
    with pytest.raises(ValueError, match="max_tokens ≥ 1, got 0"):
        at_most(0)
