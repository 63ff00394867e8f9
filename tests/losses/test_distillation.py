"""Divergences and distances: worked values, float64 twins, ends and limits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.losses.distillation import (
    Divergence,
    among_top,
    cosine_distance,
    forward_kl,
    jensen_shannon,
    of_probabilities,
    pool_features,
    reverse_kl,
    squared_error,
)

TEACHER, STUDENT = np.log([0.8, 0.2]), np.log([0.5, 0.5])
Twin = Callable[[np.ndarray, np.ndarray], np.ndarray]


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(-1)


def js(beta: float) -> Twin:
    def twin(t: np.ndarray, s: np.ndarray) -> np.ndarray:
        m = beta * t + (1 - beta) * s
        return beta * kl(t, m) + (1 - beta) * kl(s, m)

    return twin


PAIRS: dict[str, tuple[Divergence, Twin]] = {
    "forward": (forward_kl, kl),
    "reverse": (reverse_kl, lambda t, s: kl(s, t)),
    "js .5": (jensen_shannon(0.5), js(0.5)),
    "js .1": (jensen_shannon(0.1), js(0.1)),
}


def numbers(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(
    ("name", "expected"), [("forward", 0.192745), ("reverse", 0.223144), ("js .5", 0.050672)]
)
def test_two_tokens(name: str, expected: float) -> None:
    got = PAIRS[name][0](numbers(TEACHER), numbers(STUDENT))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
@given(seed=st.integers(0, 2**32 - 1))
def test_float64_twin(name: str, seed: int) -> None:
    teacher, student = np.random.default_rng(seed).normal(0, 2, (2, 3, 5))
    teacher, student = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (teacher, student))
    divergence, twin = PAIRS[name]
    got = jax.jit(divergence)(numbers(np.log(teacher)), numbers(np.log(student)))
    np.testing.assert_allclose(got, twin(teacher, student), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_what_has_no_probability_adds_nothing(name: str) -> None:
    """Both leave the same token out: value and gradient are those without it."""
    divergence = PAIRS[name][0]
    grow = lambda x: jnp.concatenate([x, jnp.asarray([-jnp.inf])])  # noqa: E731
    value = lambda s, t: divergence(t, s)  # noqa: E731
    t, s = numbers(TEACHER), numbers(STUDENT)
    want, g_want = jax.value_and_grad(value)(s, t)
    got, g_got = jax.value_and_grad(value)(grow(s), grow(t))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(g_got[:2], g_want, rtol=1e-6)
    assert float(g_got[2]) == 0


def test_a_mixture_tends_to_the_kls_when_divided_by_its_weight() -> None:
    t, s = numbers(TEACHER), numbers(STUDENT)
    for beta, expected in ((1e-3, 0.192745), (1 - 1e-3, 0.223144)):
        got = jensen_shannon(beta)(t, s) / min(beta, 1 - beta)
        np.testing.assert_allclose(got, expected, rtol=5e-3)


@pytest.mark.parametrize("beta", [0, 1, -0.1])
def test_the_ends_of_the_mixture_are_errors(beta: float) -> None:
    with pytest.raises(ValueError, match="0 < beta < 1"):
        jensen_shannon(beta)


def test_among_the_teachers_likeliest() -> None:
    """Teacher .6 .3 .1, student .2 .3 .5: of two, 2/3 1/3 against .4 .6."""
    teacher, student = numbers(np.log([0.1, 0.6, 0.3])), numbers(np.log([0.5, 0.2, 0.3]))
    want = kl(np.array([2 / 3, 1 / 3]), np.array([0.4, 0.6]))
    np.testing.assert_allclose(among_top(2, forward_kl)(teacher, student), want, rtol=1e-5)
    whole = among_top(9, forward_kl)(teacher, student)
    np.testing.assert_allclose(whole, forward_kl(teacher, student), rtol=1e-5)
    with pytest.raises(ValueError, match="k ≥ 1"):
        among_top(0, forward_kl)


def test_distances_of_features() -> None:
    """(3, 4) and (4, 3): cos 24/25, squares 1 and 1. Nothing has no direction."""
    a, b = numbers(np.array([3.0, 4.0])), numbers(np.array([4.0, 3.0]))
    np.testing.assert_allclose(cosine_distance(a, b), 0.04, atol=1e-6)
    np.testing.assert_allclose(cosine_distance(a, -7 * a), 2, atol=1e-6)
    np.testing.assert_allclose(squared_error(a, b), 1)
    gradient = jax.grad(lambda x: cosine_distance(a, x))(jnp.zeros(2))
    assert float(cosine_distance(a, jnp.zeros(2))) == 1 and np.isfinite(gradient).all()


def test_distributions_as_vectors() -> None:
    """(.8, .2) and (.5, .5): cos 1/√1.36, squares .09 each."""
    t, s = numbers(TEACHER), numbers(STUDENT)
    np.testing.assert_allclose(of_probabilities(cosine_distance)(t, s), 1 - 1.36**-0.5, rtol=1e-5)
    np.testing.assert_allclose(of_probabilities(squared_error)(t, s), 0.09, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, [1.5, 3.5, 5.5]),  # as Tunix's avg_pool_array_to_target_shape
        (1, [3.5]),
        (4, [1.5, 2.5, 4.5, 5.5]),  # which takes windows of three there: 2, 3, 4, 5
        (6, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_features_are_pooled_in_even_windows(size: int, expected: list[float]) -> None:
    features = jnp.arange(1.0, 7.0)[None]
    np.testing.assert_allclose(pool_features(features, size)[0], expected, rtol=1e-6)


def test_no_more_features_can_be_pooled_than_there_are() -> None:
    with pytest.raises(ValueError, match="pool 6 features to at most as many, got 7"):
        pool_features(jnp.ones(6), 7)
