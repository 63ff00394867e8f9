"""What the policy-gradient factories refuse, and what several rewards, filters and a reference do
to a batch.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from purepost import algorithms
from purepost.algorithms.ppo import _adapt
from purepost.filters import at_most
from purepost.mean import scalar_mean
from purepost.models.containers import WithReference, with_reference
from purepost.models.critic import actor_critic
from purepost.rollout.collect import single_turn
from purepost.rollout.draw import Sampling
from tests.contract import APART, COLLECT, TOKENS, goal_share, tasks, tiny

SGD = optax.sgd(0.1)
ALONE = single_turn(goal_share, Sampling(max_tokens=TOKENS), group=1)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("gspo", {"low": 0.0}, "0 < low, got 0"),
        ("gspo_token", {"high": -1.0}, "0 < high, got -1"),
        ("luspo", {"low": -0.1}, "0 < low"),
        ("cispo", {"high": 0}, "0 < high, got 0"),
        ("sapo", {"negative": 0.0}, "0 < negative"),
        ("gmpo", {"low": 0}, "0 < low"),
        ("dppo", {"cap": 0.0}, "0 < cap"),
        ("vespo", {"positive": (0.0, 1.0)}, "0 < k"),
        ("dapo", {"draws": 0}, "draws ≥ 1"),
        ("dapo", {"high": 0.0}, "0 < high"),
        ("reinforce_pp", {"gamma": 0.0}, "0 < gamma"),
        ("dr_grpo", {"max_tokens": 0}, "max_tokens ≥ 1"),
    ],
)
def test_hyperparameters_out_of_range_raise_when_the_factory_builds(factory, options, message):
    with pytest.raises(ValueError, match=message):
        vars(algorithms)[factory](SGD, COLLECT, **options)


def rolled(algorithm, models=None):
    models = with_reference(tiny(lora=False)) if models is None else models
    state = algorithm.init(jr.key(0), models)
    return algorithm.rollout(jr.key(1), state, tasks(0)(0))


@pytest.mark.parametrize("factory", ["grpo", "rloo", "opo", "max_rl", "pass_at_k"])
def test_a_group_of_one_has_nobody_to_be_compared_with(factory):
    with pytest.raises(ValueError, match="at least 2 completions of each prompt, got 4 of 4"):
        rolled(vars(algorithms)[factory](SGD, ALONE))


def test_gdpo_needs_several_rewards():
    with pytest.raises(ValueError, match="several rewards, got one"):
        rolled(algorithms.gdpo(SGD, COLLECT))
    with pytest.raises(ValueError, match="expected 2 weights"):
        rolled(algorithms.gdpo(SGD, APART, weights=(1.0,)))


def test_a_penalty_or_beta_needs_a_reference():
    lonely = WithReference(tiny(lora=False))
    for algorithm in (
        algorithms.reinforce_pp(SGD, COLLECT, penalty=0.1),
        algorithms.grpo(SGD, COLLECT, beta=0.1),
    ):
        with pytest.raises(ValueError, match="needs a reference"):
            rolled(algorithm, lonely)


def test_what_a_filter_drops_has_no_weight_and_stays_in_its_group():
    """Nothing is at most one token long here but what stops at once."""
    batch, metrics = rolled(algorithms.grpo(SGD, COLLECT, filters=(at_most(TOKENS - 1),)))
    whole, _ = rolled(algorithms.grpo(SGD, COLLECT))
    lengths = np.asarray(jnp.where(whole.rows.mask, 1, 0).sum(1))
    assert lengths.sum() > 0
    kept = np.asarray(batch.weights) > 0
    dropped = (np.asarray(whole.weights) > 0) & ~kept
    assert dropped.any()
    np.testing.assert_allclose(
        metrics["frac_filtered"].value, dropped.sum() / np.asarray(whole.weights).sum(), rtol=1e-6
    )
    np.testing.assert_array_equal(batch.advantages, whole.advantages)


def test_a_new_critic_and_decay_1_make_every_return_the_reward():
    """Less β times what is left of the KL, which is 0 here."""
    models = actor_critic(with_reference(tiny(lora=False)))
    algorithm = algorithms.ppo(SGD, COLLECT, decay=jnp.ones_like, beta=0.5, target=1.0)
    batch, _ = rolled(algorithm, models)
    np.testing.assert_array_equal(batch.values, 0)
    np.testing.assert_allclose(batch.returns, batch.rewards, rtol=1e-5, atol=1e-5)
    trained = np.asarray(batch.policy.rows.mask) & (np.asarray(batch.rewards) > 0)
    assert trained.any()
    lonely = actor_critic(WithReference(models.policy))
    with pytest.raises(ValueError, match="needs a reference"):
        rolled(algorithm, lonely)


@pytest.mark.parametrize(("kl", "beta"), [(0.5, 0.49), (1.1, 0.505), (9.0, 0.51)])
def test_beta_follows_the_kl_by_a_fiftieth_at_most(kl, beta):
    models = actor_critic(with_reference(tiny(lora=False)))
    state = algorithms.ppo(SGD, COLLECT, beta=0.5).init(jr.key(0), models)
    moved = _adapt(jr.key(0), state, {"kl": scalar_mean(kl)}, target=1.0)
    np.testing.assert_allclose(moved.extra, beta, rtol=1e-6)
