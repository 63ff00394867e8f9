"""Reward models: their losses in float64, and what they say as rewards of sampled completions."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import tiny
from experiments.probes.preferences import paired, solved
from purepost import train
from purepost.algorithms import grpo, process_reward_model, reward_model
from purepost.models import heads
from purepost.models.containers import with_reference
from purepost.models.heads import value_model
from purepost.rewards.models import least, model_reward, process_reward, product
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.labelled import Pairs, Steps
from purepost.rollout.sample import Completions, pad_prompts
from purepost.types import causal_rows

CLASSIFIER = heads.reward_model(jr.key(7), tiny(lora=False))
CRITIC = heads.ValueHead(CLASSIFIER.decoder, CLASSIFIER.head, jnp.full(1, 0.3))
TASKS = Tasks(pad_prompts([[3, 4], [5]], width=2))
COMPLETIONS = Completions(
    tokens=jnp.asarray([[[6, 2, 7], [8, 9, 0]], [[2, 2, 10], [11, 0, 0]]]),
    logps=jnp.zeros((2, 2, 3)),
    lengths=jnp.asarray([[3, 2], [2, 1]]),
    finish=jnp.zeros((2, 2), jnp.int32),
)
SEQUENCES = [[[3, 4, 6, 2, 7], [3, 4, 8, 9]], [[5, 2, 2], [5, 11]]]


def alone(ids: list[int]) -> np.ndarray:
    """What the critic says after each token of one plain sequence, float64."""
    rows = causal_rows(jnp.asarray([ids]), jnp.asarray([len(ids)]))
    return np.asarray(CRITIC.after(rows)[0], np.float64)


def test_bradley_terry_with_margin_and_centring():
    data = paired(0)(0)
    margins, real = np.array([0.5, 0.0, 2.0, 9.0]), np.array([1, 1, 1, 0], bool)
    data = Pairs(data.rows, jnp.asarray(margins, jnp.float32), jnp.asarray(real))
    algorithm = reward_model(optax.sgd(0.1), centring=0.1)
    terms, metrics = algorithm.loss(jr.key(0), CLASSIFIER, data)
    c, r = np.asarray(CLASSIFIER(data.rows)[..., 0], np.float64)[real].T
    expected = np.logaddexp(0, -(c - r - margins[real])).mean()
    np.testing.assert_allclose(terms["preference"].value, expected, rtol=1e-5)
    np.testing.assert_allclose(terms["centre"].value, 0.1 * ((c + r) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"].value, (c > r).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["margin"].value, (c - r).mean(), rtol=1e-4)


def test_each_step_counts_once():
    data: Steps = solved(0)(0)
    terms, metrics = process_reward_model(optax.sgd(0.1)).loss(jr.key(0), CRITIC, data)
    mask, right = np.asarray(data.rows.mask), np.asarray(data.right)
    x = np.asarray(CRITIC.after(data.rows), np.float64)[mask]
    expected = np.logaddexp(0, np.where(right[mask], -x, x)).mean()
    np.testing.assert_allclose(terms["steps"].value, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"].value, ((x > 0) == right[mask]).mean())
    assert float(terms["steps"].weight) == 6


def test_a_reward_model_as_a_reward_reads_the_last_token():
    rewards, _ = model_reward(CLASSIFIER)(TASKS, COMPLETIONS)
    expected = [[alone(ids)[-1] - 0.3 for ids in group] for group in SEQUENCES]
    np.testing.assert_allclose(rewards, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("combine", "twin"), [(product, np.prod), (least, np.min)])
def test_a_process_reward_reads_the_steps(combine, twin):
    """Token 2 ends a step: one, none, two (at the prompt's end it is none), none."""
    rewards, _ = process_reward(CRITIC, (2,), combine=combine)(TASKS, COMPLETIONS)
    for group, ids in enumerate(SEQUENCES):
        prompt = (2, 1)[group]
        for member, sequence in enumerate(ids):
            ends = [i for i, token in enumerate(sequence) if token == 2 and i >= prompt]
            got = float(rewards[group, member])
            if not ends:
                assert np.isnan(got)
                continue
            p = 1 / (1 + np.exp(-alone(sequence)[ends]))
            np.testing.assert_allclose(got, twin(p), rtol=1e-4)


def test_reinforcement_learning_by_a_reward_model():
    collect = single_turn(model_reward(CLASSIFIER), Sampling(max_tokens=3), group=4)
    algorithm = grpo(optax.adam(0.01), collect)
    state = algorithm.init(jr.key(0), with_reference(tiny(lora=False)))
    loop = train(algorithm, state, lambda step: TASKS, key=jr.key(1), steps=25)
    rewards = [float(metrics["reward"].value) for _, _, metrics in loop]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3


def test_what_is_no_reward_model():
    several = heads.reward_model(jr.key(0), tiny(lora=False), scores=2)
    with pytest.raises(ValueError, match="classifier of 1 score, got 2"):
        reward_model(optax.sgd(0.1)).loss(jr.key(0), several, paired(0)(0))
    with pytest.raises(ValueError, match="0 ≤ score < 2, got 2"):
        model_reward(several, score=2)
    with pytest.raises(ValueError, match="tokens that end a step"):
        process_reward(CRITIC, ())
    with pytest.raises(ValueError, match="0 ≤ centring"):
        reward_model(optax.sgd(0.1), centring=-1)


@pytest.mark.parametrize("build", [reward_model, process_reward_model])
def test_adapters_train_with_the_head_and_nothing_else(build):
    decoder = tiny(lora=True)
    model = (
        heads.reward_model(jr.key(0), decoder) if build is reward_model else value_model(decoder)
    )
    state = build(optax.sgd(0.1)).init(jr.key(0), model)
    assert state.params.head is not None
    shapes = {x.shape for x in jax.tree.leaves(state.params)}
    assert all(4 in shape or shape[-1] == 1 for shape in shapes)  # adapters of rank 4, the head
