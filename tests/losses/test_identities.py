"""Identities that hold whatever the numbers: estimators by exact enumeration, objectives at zero
change, DPO at its start, and what masks hide from advantages.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.advantages import at_last_token, gae, penalized, whiten
from purepost.losses import (
    KL,
    gmpo,
    gspo,
    gspo_token,
    k2,
    k3,
    k3_weighted,
    prompt_mean,
    reinforce,
    sequence_mean,
    sequence_sum,
    vespo,
)
from purepost.losses.preference import PairLogps, conservative, hinge, robust, sigmoid
from purepost.mean import Spans
from tests.losses import worked

seeds = given(seed=st.integers(0, 2**32 - 1))


def as_float(x) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def reverse_gradient(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """∂ KL(p‖q) / ∂ logits of p."""
    return p * (np.log(p / q) - kl(p, q))


def k1(logps, old_logps, ref_logps, spans):
    """log π − log π_ref, which no loss offers."""
    return logps - ref_logps


THREE = worked.spans_of([[1, 1, 1]])


@partial(jax.jit, static_argnums=0)
def enumerated(estimator: KL, logits, old, ref):
    """(Σ_y π_old(y) · estimate(y), its gradient by the logits): what sampling from π_old finds on
    average.
    """

    def value(logits):
        logps = jax.nn.log_softmax(logits)
        return (jnp.exp(old) * estimator(logps, old, ref, THREE)).sum()

    return jax.value_and_grad(value)(logits)


def expected_estimate(estimator: KL, logits, sampler, ref) -> tuple[float, np.ndarray]:
    """The same, of NumPy's probabilities."""
    rows = (as_float(x)[None] for x in (logits, np.log(sampler), np.log(ref)))
    found, grad = enumerated(estimator, *rows)
    return float(found), np.asarray(grad)[0]


@seeds
def test_kl_estimators_in_a_world_of_three_tokens(seed):
    """On-policy: k3 and k3·ρ have the value of the reverse KL; k2 and k3·ρ its gradient; k3 the
    gradient of the forward KL; and k1 none at all.
    """
    logits, other = np.random.default_rng(seed).normal(size=(2, 3))
    p, q = softmax(logits), softmax(other)
    found = {f: expected_estimate(f, logits, p, q) for f in (k1, k2, k3, k3_weighted)}
    for f in (k3, k3_weighted):
        np.testing.assert_allclose(found[f][0], kl(p, q), rtol=1e-4, atol=1e-6)
    for f in (k2, k3_weighted):
        np.testing.assert_allclose(found[f][1], reverse_gradient(p, q), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found[k3][1], p - q, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found[k1][1], 0, atol=1e-6)


@seeds
def test_only_the_weighted_estimator_is_unbiased_off_policy(seed):
    """Tokens come of another policy: k3·ρ keeps the value and the gradient."""
    logits, other, old = np.random.default_rng(seed).normal(size=(3, 3))
    p, q, sampler = softmax(logits), softmax(other), softmax(old)
    value, grad = expected_estimate(k3_weighted, logits, sampler, q)
    np.testing.assert_allclose(value, kl(p, q), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grad, reverse_gradient(p, q), rtol=1e-3, atol=1e-5)


@partial(jax.jit, static_argnums=0)
def of_sequences(estimator: KL, first, second, ref_first, ref_second):
    """The expected gradient by the logits of the first token, and of the second after each."""
    spans = worked.spans_of([[1, 1]] * 9)

    def logps(first, second):
        one, two = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
        return jnp.stack([jnp.repeat(one, 3), two.reshape(9)], 1)

    def value(first, second):
        new, ref = logps(first, second), logps(ref_first, ref_second)
        old = jax.lax.stop_gradient(new)
        return (jnp.exp(old.sum(1)) * estimator(new, old, ref, spans).sum(1)).sum()

    return jax.grad(value, (0, 1))(first, second)


@pytest.mark.parametrize("estimator", [k2, k3_weighted])
@seeds
def test_sequences_of_two_tokens_add_up_the_gradient_of_every_state(estimator, seed):
    """All nine sequences, each weighed by its probability: every state's own KL, by how often the
    policy is there.
    """
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=3), rng.normal(size=(3, 3))
    ref_first, ref_second = rng.normal(size=3), rng.normal(size=(3, 3))
    grads = of_sequences(estimator, *map(as_float, (first, second, ref_first, ref_second)))
    p, q = softmax(first), softmax(ref_first)
    rows = [
        reverse_gradient(softmax(a), softmax(b)) for a, b in zip(second, ref_second, strict=True)
    ]
    np.testing.assert_allclose(grads[0], reverse_gradient(p, q), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(grads[1], p[:, None] * rows, rtol=1e-3, atol=1e-5)


def random_episodes(seed: int):
    """Log-probabilities, advantages (one for each of two episodes in a row) and spans."""
    rng = np.random.default_rng(seed)
    episode = np.repeat([[0] * 3 + [1] * 4], 4, 0)
    mask = rng.random((4, 7)) < 0.7
    weights = (rng.random((4, 2)) < 0.8).astype(np.float32)
    per_episode = rng.normal(size=(4, 2))
    advantages = np.take_along_axis(per_episode, episode, 1)
    spans = Spans(jnp.asarray(mask), jnp.asarray(episode, jnp.int32), jnp.asarray(weights))
    return as_float(-rng.exponential(size=(4, 7))), as_float(advantages), spans


@partial(jax.jit, static_argnums=(0, 1))
def gradient(objective, aggregate, logps, advantages, spans):
    """By log-probabilities that equal the old ones."""

    def value(x):
        return aggregate(objective(x, logps, advantages, spans)[0], spans).value

    return jax.grad(value)(logps)


@seeds
def test_at_zero_change_the_objectives_of_sequences_are_reinforce(seed):
    """Under the mean over sequences; GSPO's under their sum too, which is LUSPO."""
    logps, advantages, spans = random_episodes(seed)
    plain = gradient(reinforce, sequence_mean, logps, advantages, spans)
    for objective in (gspo, gspo_token, gmpo, vespo):
        found = gradient(objective, sequence_mean, logps, advantages, spans)
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-7)
    plain = gradient(reinforce, sequence_sum, logps, advantages, spans)
    found = gradient(gspo, sequence_sum, logps, advantages, spans)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-7)


@jax.jit
def whole_and_split(losses, bad, spans, order):
    """Value and gradient of the prompt mean: of everything, and of two parts in another order."""

    def part(x, rows):
        return prompt_mean(x[rows], jax.tree.map(lambda leaf: leaf[rows], spans))

    def split(x):
        return jax.tree.map(jnp.add, part(x, order[:1]), part(x, order[1:])).value

    def whole(x):
        return prompt_mean(x, spans).value

    return jax.value_and_grad(whole)(losses), jax.value_and_grad(split)(bad)


@given(seed=st.integers(0, 2**32 - 1), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_the_prompt_mean_does_not_care_for_splits_order_or_what_is_masked(seed, bad):
    losses, _, spans = random_episodes(seed)
    order = jnp.asarray(np.random.default_rng(seed).permutation(4))
    whole, parts = whole_and_split(losses, jnp.where(spans.mask, losses, bad), spans, order)
    for a, b in zip(parts, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@jax.jit
def at_init(chosen, rejected, lengths, beta, epsilon):
    """For each of four losses: the value and both slopes of every pair, the reference equal."""

    def loss(chosen, rejected, f):
        same = jax.lax.stop_gradient((chosen, rejected))
        losses = f(PairLogps(chosen, rejected, *same, *lengths), beta=beta)
        return losses.sum(), losses

    noisy = [partial(f, epsilon=epsilon) for f in (conservative, robust)]
    found = [
        jax.grad(loss, (0, 1), has_aux=True)(chosen, rejected, f) for f in (sigmoid, hinge, *noisy)
    ]
    return [(losses, *slopes) for slopes, losses in found]


@given(seed=st.integers(0, 2**32 - 1), beta=st.floats(0.01, 2.0), epsilon=st.floats(0.0, 0.4))
def test_dpo_is_ln_2_at_init_with_slopes_of_half_of_beta(seed, beta, epsilon):
    """Whatever the log-probabilities and lengths, where policy and reference agree. Of its kin:
    what labels that may be wrong leave of the slope, or need beyond it.
    """
    rng = np.random.default_rng(seed)
    chosen, rejected = as_float(-rng.exponential(20, (2, 3)))
    lengths = as_float(rng.integers(1, 9, (2, 3)))
    sure = 1 - 2 * epsilon
    expected = [(np.log(2), 0.5), (1, 1), (np.log(2), 0.5 * sure), (np.log(2), 0.5 / sure)]
    found = at_init(chosen, rejected, lengths, as_float(beta), as_float(epsilon))
    for got, (value, slope) in zip(found, expected, strict=True):
        for x, y in zip(got, (value, -slope * beta, slope * beta), strict=True):
            np.testing.assert_allclose(x, [y] * 3, rtol=1e-4)


@jax.jit
def advantages_of(rewards, values, ref, spans):
    """Everything that makes advantages of tokens."""
    return (
        gae(rewards, values, spans, gamma=0.9, decay=0.8),
        penalized(rewards, values, ref, spans, penalty=0.1, gamma=0.9),
        at_last_token(rewards, spans),
        whiten(rewards, spans.spread(spans.weights)),
    )


@given(seed=st.integers(0, 2**32 - 1), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_masked_reaches_no_advantage_of_tokens(seed, bad):
    numbers, _, spans = random_episodes(seed)
    columns = (numbers, *as_float(np.random.default_rng(seed).normal(size=(2, 4, 7))))
    clean = advantages_of(*columns, spans)
    dirty = advantages_of(*(jnp.where(spans.mask, x, bad) for x in columns), spans)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
