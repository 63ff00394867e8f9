"""What the policy-gradient factories refuse, and what several rewards, filters and a reference do
to a batch.
"""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import tiny
from experiments.probes.sampled import APART, COLLECT, GREEDY, TOKENS, goal_share, tasks
from purepost import algorithms
from purepost.adapt import adaptive_kl
from purepost.advantages import group_whitened
from purepost.filters import at_most, fresh
from purepost.losses import clipped, dual_clipped, gspo, k1, k2, tis, two_sided
from purepost.mean import Mean, scalar_mean
from purepost.models.containers import WithReference, with_reference
from purepost.models.critic import actor_critic, one_trunk
from purepost.models.heads import ValueHead
from purepost.rewards import combine_rewards, text_reward
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.dynamic import dynamic
from purepost.rollout.sample import pad_prompts
from purepost.text import Tokenizer
from purepost.tree import named_leaves

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
        ("grpo", {"beta": -0.1}, "0 ≤ beta"),
        ("grpo", {"objective": partial(clipped, low=0.0)}, "0 < low, got 0"),
        ("grpo", {"objective": partial(two_sided, ceiling=1.0)}, "1 < ceiling"),
        ("rloo", {"objective": partial(dual_clipped, bound=0.5)}, "1 < bound"),
        ("ppo", {"objective": partial(gspo, high=0.0)}, "0 < high"),
        ("ppo", {"value_clip": 0.0}, "0 < value_clip"),
        ("ppo", {"gamma": 0.0}, "0 < gamma"),
        ("ppo", {"target": 0.0}, "target > 0 nats, got 0"),
        ("ppo", {"positive_nll": -1.0}, "0 ≤ positive_nll"),
        ("vapo", {"alpha": 0.0}, "0 < alpha"),
        ("grpo", {"kl": k1, "beta": 0.1}, "got k1, whose expected gradient is 0"),
        ("grpo", {"epochs": 0}, "epochs ≥ 1"),
    ],
)
def test_hyperparameters_out_of_range_raise_when_the_factory_builds(factory, options, message):
    with pytest.raises(ValueError, match=message):
        vars(algorithms)[factory](SGD, COLLECT, **options)


def rolled(algorithm, models=None):
    models = with_reference(tiny(lora=False)) if models is None else models
    state = algorithm.init(jr.key(0), models)
    return algorithm.rollout(jr.key(1), state, tasks(0)(0))


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        ("grpo", {}),
        ("rloo", {}),
        ("dr_grpo", {"max_tokens": TOKENS}),
        ("dapo", {}),
        ("gdpo", {}),
        ("opo", {}),
        ("max_rl", {}),
        ("pass_at_k", {}),
        ("reinforce_pp", {"advantage": group_whitened, "refine": None}),
    ],
)
def test_a_group_of_one_has_nobody_to_be_compared_with(factory, options):
    """A collector that says its group is refused at once, another one at the first step."""
    build = vars(algorithms)[factory]
    for alone in (ALONE, dynamic(ALONE, 2)):
        with pytest.raises(ValueError, match="at least 2 completions of each prompt, got 1 of 1"):
            build(SGD, alone, **options)
    if factory == "grpo":
        with pytest.raises(ValueError, match="at least 2 completions of each prompt, got 4 of 4"):
            rolled(build(SGD, lambda key, model, tasks: ALONE(key, model, tasks)))


@pytest.mark.parametrize("factory", ["reinforce", "reinforce_pp", "remax"])
def test_a_group_of_one_will_do_where_nothing_is_compared(factory):
    collectors = (ALONE, GREEDY) if factory == "remax" else (ALONE,)
    vars(algorithms)[factory](SGD, *collectors)


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


def test_ppo_needs_a_critic():
    lonely: Any = with_reference(tiny(lora=False))
    with pytest.raises(ValueError, match="expected a policy with a critic, got WithReference"):
        algorithms.ppo(SGD, COLLECT).init(jr.key(0), lonely)


@pytest.fixture(scope="module")
def judged():
    """Models with a critic, and a batch of PPO's with the log-probabilities of before the step."""
    models = actor_critic(with_reference(tiny(lora=False)))
    return models, rolled(algorithms.ppo(SGD, COLLECT, epochs=2), models)[0]


@eqx.filter_jit
def losses_of(algorithm, models, batch):
    """(terms, metrics)"""
    return algorithm.loss(jr.key(2), models, batch)


def test_three_critics_say_the_same_and_train_different_trunks(judged):
    """A trunk of its own, the policy's, and the policy's with no gradient into it."""
    loss = algorithms.ppo(SGD, COLLECT).loss
    pair = with_reference(tiny(lora=False))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def value(models):
        return loss(jr.key(2), models, judged[1])[0]["value"].value

    def found(models):  # the head a little off 0
        return value(eqx.tree_at(lambda m: m.critic.head, models, replace_fn=lambda h: h + 0.1))

    (first, own), (second, shared) = found(actor_critic(pair)), found(one_trunk(pair))
    third, head = found(one_trunk(pair, detached=True))
    np.testing.assert_allclose([second, third], [first] * 2, rtol=1e-5)
    for grad in (shared, head):
        np.testing.assert_allclose(grad.critic.head, own.critic.head, rtol=1e-4, atol=1e-7)
    trunk = optax.tree.norm(own.critic.decoder)
    assert trunk > 1e-3 and optax.tree.norm(own.policy) == 0
    np.testing.assert_allclose(optax.tree.norm(shared.policy), trunk, rtol=1e-4)
    assert optax.tree.norm(head.policy) == 0


def test_a_critic_on_adapters_shares_the_base_of_its_trunk():
    models = actor_critic(with_reference(tiny(lora=True)))
    state = algorithms.ppo(SGD, COLLECT).init(jr.key(0), models)
    names = {name for name, _ in named_leaves(state.params)}
    assert {n.split(".")[0] for n in names} == {"policy", "critic"} and "critic.head" in names
    assert all(n.endswith((".a", ".b", "critic.head")) for n in names)
    assert isinstance(state.frozen.critic, ValueHead)
    assert state.frozen.critic.decoder.embed is state.frozen.policy.embed


def test_the_entropy_bonus_of_ppo_is_a_term_and_the_entropy_is_logged(judged):
    for bonus in (0.0, 0.25):
        algorithm = algorithms.ppo(SGD, COLLECT, entropy=bonus)
        terms, metrics = losses_of(algorithm, *judged)
        assert 0 < metrics["entropy"].value < np.log(12)
        assert ("entropy" in terms) == (bonus > 0)
    np.testing.assert_allclose(terms["entropy"].value, -0.25 * metrics["entropy"].value, rtol=1e-6)


def test_decoupled_ppo_weighs_tokens_by_how_far_the_sampler_was(judged):
    """π_prox is the policy before the step, π_behaviour a sampler e^.3 as sure: w = e^−.3, and
    e^.3 is cut at 1.2.
    """
    models, batch = judged
    plain = algorithms.ppo(SGD, COLLECT, epochs=2)
    decoupled = algorithms.ppo(SGD, COLLECT, epochs=2, correction=tis(high=1.2))
    for shift, weight in ((0.3, np.exp(-0.3)), (-0.3, 1.2)):
        behaviour = batch.policy.old_logps + shift
        # Advantages of one sign: of whitened ones little but rounding would be left of the sums.
        moved = eqx.tree_at(
            lambda b: (b.policy.sampler_logps, b.policy.advantages),
            batch,
            (behaviour, jnp.ones_like(batch.policy.advantages)),
        )
        one, two = (losses_of(a, models, moved)[0]["policy"] for a in (plain, decoupled))
        assert abs(one.total) > 0.1
        np.testing.assert_allclose(two.total, weight * one.total, rtol=1e-4)
        assert two.weight == one.weight


def test_stale_episodes_do_not_count():
    def aged(key, model, tasks):
        episodes, metrics = COLLECT(key, model, tasks)
        ages = jnp.arange(episodes.group.size, dtype=jnp.int32) % 4
        return dataclasses.replace(episodes, staleness=ages), metrics

    batch, metrics = rolled(algorithms.grpo(SGD, aged, filters=(fresh(1),)))
    whole, _ = rolled(algorithms.grpo(SGD, COLLECT, filters=(fresh(0),)))
    assert metrics["frac_filtered"].value > 0
    kept = np.asarray(whole.weights) * np.asarray([[1, 1, 0, 0]])
    np.testing.assert_array_equal(batch.weights, kept)
    np.testing.assert_array_equal(batch.advantages, whole.advantages)
    with pytest.raises(ValueError, match="max_staleness ≥ 0 steps, got -1"):
        fresh(-1)


def test_reinforce_pp_with_the_groups_baseline():
    """(r − mean of the group), whitened over tokens, and k2 as a term of the loss."""
    algorithm = algorithms.reinforce_pp(
        SGD, COLLECT, advantage=group_whitened, refine=None, kl=k2, beta=0.1
    )
    batch, _ = rolled(algorithm)
    counted = np.asarray(batch.advantages)[np.asarray(batch.spans.spread(batch.weights)) > 0]
    np.testing.assert_allclose(counted.mean(), 0, atol=1e-5)
    np.testing.assert_allclose(counted.std(ddof=1), 1, rtol=1e-4)
    terms, _ = losses_of(algorithm, with_reference(tiny(lora=False)), batch)
    np.testing.assert_allclose(terms["kl"].value, 0.0, atol=1e-6)


class Letters(Tokenizer):
    """A tokenizer whose token i is the i-th letter."""

    def __init__(self):
        pass

    def decode(self, ids, **options):
        return "".join(chr(97 + int(i)) for i in ids)


def test_gdpo_takes_several_rewards_in_python():
    """Counts of two letters, the second weighed by 10; one without a number unscores a sample."""

    def vowels(completions):
        return [float(sum(c in "aei" for c in text)) for text in completions]

    def late(completions):
        return [None if "b" in text else float(sum(c > "f" for c in text)) for text in completions]

    def broken(completions):
        return [float("nan") if "c" in text else 1.0 for text in completions]

    functions = combine_rewards([vowels, late, broken], [1, 10, 1])
    reward = text_reward(functions, Letters(), apart=True)
    collect = single_turn(reward, Sampling(max_tokens=TOKENS), group=4)
    prompts = Tasks(pad_prompts([[3, 4], [5]], ids=range(2), width=2), {"prompt": ["de", "f"]})
    models = with_reference(tiny(lora=False))
    algorithm = algorithms.gdpo(SGD, collect, weights=(1.0, 2.0, 0.0))
    state = algorithm.init(jr.key(0), models)
    with pytest.warns(RuntimeWarning, match="broken returned nan"):
        episodes, _ = collect(jr.key(3), models.policy, prompts)
    assert episodes.components is not None and episodes.components.shape == (8, 3)
    texts = [
        Letters().decode(t[:n]) for t, n in zip(episodes.tokens, episodes.lengths, strict=True)
    ]
    for text, parts, total in zip(texts, episodes.components, episodes.rewards, strict=True):
        expected = [vowels([text])[0], late([text])[0], broken([text])[0]]
        if "c" in text:
            assert np.isnan(parts).all() and np.isnan(total)
        elif "b" in text:
            np.testing.assert_array_equal(parts, [expected[0], np.nan, 1])
        else:
            np.testing.assert_allclose(parts, [expected[0], 10 * expected[1], 1])
            np.testing.assert_allclose(total, expected[0] + 10 * expected[1] + 1)
    with pytest.warns(RuntimeWarning, match="broken returned nan"):
        batch, metrics = algorithm.rollout(jr.key(3), state, prompts)
    assert np.abs(batch.advantages).max() > 0.1 and "rewards/late/mean" in metrics


@pytest.mark.parametrize(("kl", "beta"), [(0.5, 0.49), (1.1, 0.505), (9.0, 0.51)])
def test_beta_follows_the_kl_by_a_fiftieth_at_most(kl, beta):
    models = actor_critic(with_reference(tiny(lora=False)))
    state = algorithms.ppo(SGD, COLLECT, beta=0.5).init(jr.key(0), models)
    after = adaptive_kl(1.0)
    moved = after(jr.key(0), state, {"kl": scalar_mean(kl)})
    np.testing.assert_allclose(moved.extra, beta, rtol=1e-6)
    nothing = Mean(jnp.zeros(()), jnp.zeros(()))  # a step in which nothing counted
    assert after(jr.key(0), state, {"kl": nothing}).extra == 0.5
