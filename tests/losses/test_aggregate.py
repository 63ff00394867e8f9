"""Aggregation: worked values, float64 twins, splits, and what hides behind masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.losses import Aggregate, constant, sequence_mean, sequence_sum, token_mean
from purepost.mean import Spans, add
from tests.losses import worked

L_MAX = 8
PAIRS: dict[str, tuple[Aggregate, worked.Twin]] = {
    "token_mean": (token_mean, worked.token_mean),
    "sequence_mean": (sequence_mean, worked.sequence_mean),
    "sequence_sum": (sequence_sum, worked.sequence_sum),
    "constant": (constant(L_MAX), worked.over(L_MAX)),
}
every = pytest.mark.parametrize("name", PAIRS)


def random_rows(seed: int, b: int = 6, t: int = 7, e: int = 2):
    """Losses, and rows of two episodes, some unscored, some empty."""
    rng = np.random.default_rng(seed)
    episode = (np.arange(t) >= t // 2).astype(np.int32) * np.ones((b, 1), np.int32)
    mask = rng.random((b, t)) < 0.6
    mask[0] = False
    weights = (rng.random((b, e)) < 0.7).astype(np.float32)
    return rng.normal(size=(b, t)).astype(np.float32), mask, episode, weights


def spans_of(mask, episode, weights) -> Spans:
    return Spans(jnp.asarray(mask), jnp.asarray(episode), jnp.asarray(weights))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 14 / 6),
        ("constant", 14 / 24),
        ("sequence_mean", 4 / 3),
        ("sequence_sum", 14 / 3),
    ],
)
def test_two_full_rows_and_an_empty_one(name, expected):
    losses = jnp.asarray([[1.0] * 2 + [9.0] * 6, [3.0] * 4 + [9.0] * 4, [9.0] * 8])
    spans = worked.spans_of([[1] * 2 + [0] * 6, [1] * 4 + [0] * 4, [0] * 8])
    np.testing.assert_allclose(PAIRS[name][0](losses, spans).value, expected, rtol=1e-6)


@every
@given(seed=st.integers(0, 2**32 - 1))
def test_float64_twin(name, seed):
    losses, *rest = random_rows(seed)
    aggregate, twin = PAIRS[name]
    mean = aggregate(jnp.asarray(losses), spans_of(*rest))
    total, weight = twin(worked.episodes_of(losses, *rest))
    np.testing.assert_allclose(mean.total, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mean.weight, weight, rtol=1e-6)


@every
@given(seed=st.integers(0, 2**32 - 1), parts=st.sampled_from([1, 2, 3, 6]))
def test_any_split_has_the_value_and_the_gradient_of_the_whole(name, seed, parts):
    losses, *rest = random_rows(seed)
    aggregate = PAIRS[name][0]

    def value(losses, parts):
        means = [
            {"x": aggregate(losses[i::parts], spans_of(*(x[i::parts] for x in rest)))}
            for i in range(parts)
        ]
        total = means[0]
        for other in means[1:]:
            total = add(total, other)
        return total["x"].value

    one, g_one = jax.value_and_grad(value)(jnp.asarray(losses), 1)
    many, g_many = jax.value_and_grad(value)(jnp.asarray(losses), parts)
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(g_many, g_one, rtol=1e-5, atol=1e-8)


@every
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_masked_reaches_neither_value_nor_gradient(name, bad):
    losses, mask, episode, weights = random_rows(1)
    spans = spans_of(mask, episode, np.ones_like(weights))
    value = lambda x: PAIRS[name][0](x, spans).value  # noqa: E731
    clean = jax.value_and_grad(value)(jnp.asarray(np.where(mask, losses, 0.0)))
    dirty = jax.value_and_grad(value)(jnp.asarray(np.where(mask, losses, bad), jnp.float32))
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert (np.asarray(dirty[1])[~mask] == 0).all()


@every
@pytest.mark.parametrize("hidden", ["masks", "weights"])
def test_nothing_trained_is_a_loss_of_zero_with_gradient_zero(name, hidden):
    losses, mask, episode, weights = random_rows(2)
    spans = spans_of(
        mask & (hidden != "masks"),
        episode,
        weights * 0 if hidden == "weights" else weights,
    )
    value, grad = jax.value_and_grad(lambda x: PAIRS[name][0](x, spans).value)(jnp.asarray(losses))
    assert float(value) == 0.0
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("parts", [[[0], [1, 2]], [[0, 1], [2]], [[0], [1], [2]], [[2], [0, 1]]])
def test_tokens_count_the_same_however_they_are_split(parts):
    """Micro-batches with token losses [4], [1, 2, 3] and one with none: 2.5, a quarter each."""
    losses = jnp.asarray([[4.0, 0, 0], [1, 2, 3], [7, 7, 7]])
    mask = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]])

    def value(losses):
        means = [
            token_mean(losses[jnp.asarray(p)], worked.spans_of(mask[p].tolist())) for p in parts
        ]
        return jax.tree.map(lambda *x: sum(x), *means).value

    loss, grad = jax.value_and_grad(value)(losses)
    np.testing.assert_allclose(loss, 2.5, rtol=1e-6)
    np.testing.assert_allclose(grad, mask / 4, rtol=1e-6)


def test_rows_of_weight_0_do_not_count_but_empty_ones_do():
    losses = jnp.ones((3, 2))
    spans = worked.spans_of([[1, 1], [0, 0], [1, 1]], weights=[1, 1, 0])
    np.testing.assert_allclose(sequence_mean(losses, spans).value, 1 / 2, rtol=1e-6)
    np.testing.assert_allclose(sequence_sum(losses, spans).value, 2 / 2, rtol=1e-6)
    np.testing.assert_allclose(token_mean(losses, spans).value, 2 / 2, rtol=1e-6)
    np.testing.assert_allclose(constant(4)(losses, spans).value, 2 / 8, rtol=1e-6)


def test_a_limit_below_one_token_is_an_error():
    with pytest.raises(ValueError, match="max_tokens ≥ 1, got 0"):
        constant(0)
