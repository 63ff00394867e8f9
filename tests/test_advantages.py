"""Advantages: worked values, a float64 twin, unscored rewards, groups in any order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.advantages import (
    Advantage,
    group_centered,
    group_normalized,
    group_statistics,
    leave_one_out,
)

NAN = float("nan")
EVERY: dict[str, Advantage] = {
    "group_normalized": group_normalized,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
}
every = pytest.mark.parametrize("name", EVERY)


def of(advantage: Advantage, rewards, group=None, groups: int = 1) -> np.ndarray:
    """Advantages as an array; one group unless said."""
    r = jnp.asarray(rewards, jnp.float32)
    g = jnp.zeros(r.shape[0], jnp.int32) if group is None else jnp.asarray(group, jnp.int32)
    return np.asarray(advantage(r, g, groups))


def twin(name: str, rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """From the formulas, in float64, one group after the other."""
    out = np.zeros(len(rewards))
    for g in set(group.tolist()):
        mine = (group == g) & np.isfinite(rewards)
        r = rewards[mine].astype(np.float64)
        if len(r) < 2 or r.max() == r.min():
            continue
        match name:
            case "group_normalized":
                out[mine] = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
            case "group_centered":
                out[mine] = r - r.mean()
            case _:
                out[mine] = (len(r) * r - r.sum()) / (len(r) - 1)
    return out


@every
@given(seed=st.integers(0, 2**32 - 1))
def test_float64_twin_with_groups_in_any_order_and_unscored_rewards(name, seed):
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(3), 4))
    rewards = rng.integers(0, 5, 12).astype(np.float32) / 4
    rewards[rng.random(12) < 0.25] = np.nan
    got = of(EVERY[name], rewards, group, 3)
    np.testing.assert_allclose(got, twin(name, rewards, group), rtol=1e-5, atol=1e-6)


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


def test_leave_one_out_of_groups_of_one_is_an_error():
    with pytest.raises(ValueError, match="at least 2 completions of each prompt, got 3 of 3"):
        of(leave_one_out, [1, 2, 3], [0, 1, 2], 3)


def test_group_centered_values():
    np.testing.assert_allclose(of(group_centered, [1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_give_exactly_0_whatever_rounding_leaves(epsilon, ddof):
    """Eight rewards of .7: their float32 deviation is not 0, so the formula alone is far off."""
    advantage = functools.partial(group_normalized, epsilon=epsilon, ddof=ddof)
    assert (of(advantage, [0.7] * 8) == 0).all()
    assert (of(jax.jit(advantage, static_argnums=2), [0.7] * 8) == 0).all()


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
    rewards = jnp.asarray([2.0, 0.0, NAN, 1.0, 5.0, 5.0])
    group = jnp.asarray([0, 0, 0, 0, 1, 1], jnp.int32)
    s = group_statistics(rewards, group, 2)
    np.testing.assert_array_equal(s.rewards, [2, 0, 0, 1, 5, 5])
    np.testing.assert_array_equal(s.count, [3, 3, 3, 3, 2, 2])
    np.testing.assert_allclose(s.mean, [1, 1, 1, 1, 5, 5])
    np.testing.assert_allclose(s.deviation, [1, 1, 1, 1, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(s.informative, [1, 1, 0, 1, 0, 0])
    biased = group_statistics(rewards, group, 2, ddof=0)
    np.testing.assert_allclose(biased.deviation[0], np.sqrt(2 / 3), rtol=1e-6)


def test_epsilon_may_be_an_array():
    """So that a sweep is a vmap."""
    rewards, group = jnp.asarray([2.0, 0.0, 1.0]), jnp.zeros(3, jnp.int32)
    sweep = jax.vmap(lambda e: group_normalized(rewards, group, 1, epsilon=e))
    got = sweep(jnp.asarray([1e-4, 1.0]))
    np.testing.assert_allclose(got, [[0.9999, -0.9999, 0], [0.5, -0.5, 0]], atol=1e-6)
