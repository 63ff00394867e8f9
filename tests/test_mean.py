"""Means as two sums, masked reductions, and episodes within rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.mean import Mean, Spans, add, masked_mean, mean_of, scalar_mean, select


def mean(total: float, weight: float) -> Mean:
    return Mean(jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))


def test_a_mean_is_divided_once():
    """[4] and [1, 2, 3]: 2.5, not the mean of their means, 3."""
    both = add({"x": mean(4, 1)}, {"x": mean(6, 3)})
    np.testing.assert_allclose(both["x"].value, 2.5)


def test_weight_0_is_0_with_gradient_0():
    value, grad = jax.value_and_grad(lambda t: Mean(t, jnp.zeros(())).value)(jnp.asarray(3.0))
    assert float(value) == 0.0 and float(grad) == 0.0


def test_a_mean_of_many_numbers_divides_each():
    m = Mean(jnp.asarray([2.0, 5.0, 7.0]), jnp.asarray([4.0, 0.0, 1.0]))
    np.testing.assert_array_equal(m.value, [0.5, 0.0, 7.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_entries_pass_neither_value_nor_gradient(bad):
    mask = jnp.asarray([True, False])
    x = jnp.asarray([2.0, bad])
    value, grad = jax.value_and_grad(lambda x: masked_mean(x, mask).value)(x)
    assert float(value) == 2.0
    np.testing.assert_array_equal(grad, [1.0, 0.0])
    np.testing.assert_array_equal(select(mask, x), [2.0, 0.0])


def test_selecting_the_input_saves_the_gradient_of_an_exponential():
    """new [−1, −2], old [−1, −inf], mask [1, 0]: loss −1, gradient [−1, 0], where selecting the
    output gives [−1, nan].
    """
    new, old, mask = jnp.asarray([-1.0, -2.0]), jnp.asarray([-1.0, -np.inf]), [True, False]

    def loss(new):
        ratio = jnp.exp(select(jnp.asarray(mask), new) - select(jnp.asarray(mask), old))
        return -masked_mean(ratio, jnp.asarray(mask)).value

    value, grad = jax.value_and_grad(loss)(new)
    np.testing.assert_allclose(value, -1.0)
    np.testing.assert_allclose(grad, [-1.0, 0.0])


def test_everything_masked_is_0():
    assert float(masked_mean(jnp.asarray([jnp.nan]), jnp.asarray([False])).value) == 0.0


def test_numbers_as_means():
    assert float(scalar_mean(3.5).value) == 3.5
    assert float(scalar_mean(jnp.asarray(2, jnp.int32)).value) == 2.0
    m = mean_of(jnp.asarray([[1.0, 2.0], [3.0, 6.0]]))
    assert (float(m.total), float(m.weight)) == (12.0, 4.0)


@pytest.fixture
def spans() -> Spans:
    """Row 0: episodes 0 0 1, the last token masked. Row 1: episode 1 only."""
    return Spans(
        mask=jnp.asarray([[1, 1, 1, 0], [0, 1, 1, 0]], bool),
        episode=jnp.asarray([[0, 0, 1, 1], [0, 1, 1, 1]], jnp.int32),
        weights=jnp.ones((2, 2)),
    )


def test_sums_and_lengths_of_episodes(spans):
    x = jnp.asarray([[1.0, 2.0, 4.0, np.nan], [np.inf, 8.0, 16.0, np.nan]])
    np.testing.assert_array_equal(spans.sum(x), [[3.0, 4.0], [0.0, 24.0]])
    np.testing.assert_array_equal(spans.lengths, [[2.0, 1.0], [0.0, 2.0]])


def test_spread_gives_every_trained_token_its_episodes_number(spans):
    x = jnp.asarray([[10.0, 20.0], [30.0, 40.0]])
    np.testing.assert_array_equal(spans.spread(x), [[10, 10, 20, 0], [0, 40, 40, 0]])


def test_the_gradient_of_a_sum_stays_within_its_episode(spans):
    grad = jax.grad(lambda x: spans.sum(x)[0, 1])(jnp.zeros((2, 4)))
    np.testing.assert_array_equal(grad, [[0, 0, 1, 0], [0, 0, 0, 0]])
