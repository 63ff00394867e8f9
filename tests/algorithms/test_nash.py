"""Nash-MD: its opponent is the geometric mixture, its loss the formula."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import tiny
from experiments.probes.sampled import goal_share, tasks
from purepost.algorithms import nash_md
from purepost.algorithms.nash_md import ByReward
from purepost.models.containers import WithReference
from purepost.rollout.draw import Sampling
from purepost.rollout.mixture import generate_mixture
from purepost.rollout.sample import generate, pad_prompts
from purepost.rollout.score import score
from purepost.types import causal_rows

POLICY, OTHER = tiny(lora=True), tiny(lora=False, seed=3)
PROMPTS = pad_prompts([[3, 4], [5], [6, 7]], ids=[4, 0, 9], width=2)
SAMPLING = Sampling(max_tokens=3, temperature=0.7, stop_ids=(1, 2))


@pytest.mark.parametrize(("share", "model"), [(0.0, POLICY), (1.0, OTHER)])
def test_at_its_ends_the_mixture_is_one_of_the_models(share, model):
    mixed = generate_mixture(jr.key(1), POLICY, OTHER, PROMPTS, SAMPLING, share=share)
    alone = generate(jr.key(1), model, PROMPTS, SAMPLING)
    for name in ("tokens", "lengths", "finish"):
        np.testing.assert_array_equal(vars(mixed)[name], vars(alone)[name])
    np.testing.assert_allclose(mixed.logps, alone.logps, rtol=1e-4, atol=1e-5)


def test_tokens_have_the_probability_of_the_normalised_product():
    found = generate_mixture(jr.key(1), POLICY, OTHER, PROMPTS, SAMPLING, share=0.25)
    for row, prompt in enumerate([[3, 4], [5], [6, 7]]):
        n = int(found.lengths[row, 0])
        ids = prompt + np.asarray(found.tokens[row, 0, :n]).tolist()
        rows = causal_rows(jnp.asarray([ids]), jnp.asarray([len(ids)]))
        logits = [np.asarray(m.unembed(m(rows)[0])[0], np.float64) for m in (POLICY, OTHER)]
        mixed = (0.75 * logits[0] + 0.25 * logits[1]) / 0.7
        logps = mixed - np.log(np.exp(mixed).sum(-1, keepdims=True))
        expected = [logps[i - 1, ids[i]] for i in range(len(prompt), len(ids))]
        np.testing.assert_allclose(found.logps[row, 0, :n], expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_formula():
    models = WithReference(tiny(lora=False), OTHER)
    algorithm = nash_md(optax.sgd(0.1), ByReward(goal_share), Sampling(max_tokens=4), beta=0.3)
    state = algorithm.init(jr.key(0), models)
    batch, metrics = algorithm.rollout(jr.key(1), state, tasks(0)(0))
    terms, _ = algorithm.loss(jr.key(2), models, batch)
    logps, ref = (np.asarray(score(m, batch.rows).logps, np.float64).sum(1) for m in
                  (models.policy, OTHER))  # fmt: skip
    weights = np.asarray(batch.weights)
    assert weights.sum() >= 3 and (np.abs(np.asarray(batch.advantages)) <= 0.5).all()
    policy = -(np.asarray(batch.advantages) * logps * weights).sum() / weights.sum()
    np.testing.assert_allclose(terms["policy"].value, policy, rtol=1e-4, atol=1e-6)
    kl = 0.3 * ((logps - ref) ** 2 / 2 * weights).sum() / weights.sum()
    np.testing.assert_allclose(terms["kl"].value, kl, rtol=1e-4)
    chance = np.asarray(batch.advantages)[weights > 0] + 0.5
    np.testing.assert_allclose(metrics["win_rate"].value, chance.mean(), rtol=1e-5)


def test_what_cannot_be():
    prefer = ByReward(goal_share)
    with pytest.raises(ValueError, match="0 ≤ alpha ≤ 1"):
        nash_md(optax.sgd(0.1), prefer, SAMPLING, alpha=1.5)
    with pytest.raises(ValueError, match="0 < temperature"):
        nash_md(optax.sgd(0.1), prefer, Sampling(max_tokens=3, temperature=0.0))
    algorithm = nash_md(optax.sgd(0.1), prefer, SAMPLING)
    state = algorithm.init(jr.key(0), WithReference(tiny(lora=False)))
    with pytest.raises(ValueError, match="expected a reference, got none"):
        algorithm.rollout(jr.key(1), state, tasks(0)(0))
    assert jax.tree.leaves(state.params)
