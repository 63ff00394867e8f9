"""Drawing tokens: exact distributions, and filters against references in NumPy."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from purepost.rollout import draw as module
from purepost.rollout.draw import Sampling, draw, invert_cdf, keep_likely

V = 7
EDGES = [0.0, 2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-23, 1 - 2.0**-24]
invert = jax.jit(invert_cdf)
jitted = eqx.filter_jit(draw)  # numbers stay numbers, arrays are traced


def search(uniform: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The first index whose running sum exceeds u × total, in float64, for one row of weights."""
    running = np.cumsum(weights.astype(np.float64))
    return np.searchsorted(running, uniform.astype(np.float64) * running[-1], side="right")


@pytest.mark.parametrize("v", [1, 5, 256, 257, 700])
def test_inversion_of_whole_weights_is_exact(v: int) -> None:
    """Small integers add up without rounding: every edge of the distribution is hit exactly."""
    rng = np.random.default_rng(v)
    weights = rng.integers(0, 4, v).astype(np.float32)
    weights[rng.integers(v)] = 3
    total = int(weights.sum())
    steps = np.arange(total) / total
    ulp = np.nextafter(np.arange(1, total, dtype=np.float32), np.float32(0)) / np.float32(total)
    uniform = np.concatenate([EDGES, steps, rng.random(2000), ulp]).astype(np.float32)
    exact = (uniform * np.float32(total)).astype(np.float64)  # what the float32 product is
    want = np.searchsorted(np.cumsum(weights), exact, side="right")
    want = np.minimum(want, np.nonzero(weights)[0][-1])
    got = np.asarray(invert(jnp.asarray(uniform), jnp.asarray(np.tile(weights, (len(uniform), 1)))))
    np.testing.assert_array_equal(got, want)
    assert (weights[got] > 0).all()


@pytest.mark.parametrize("v", [300, 1000])
def test_inversion_of_any_weights_is_a_search_of_the_running_sum(v: int) -> None:
    """Four thousand uniforms; where the index differs, the uniform lies on the edge between."""
    rng = np.random.default_rng(v)
    weights = (rng.exponential(size=v) ** 4 * (rng.random(v) < 0.6)).astype(np.float32)
    uniform = np.concatenate([EDGES, rng.random(4000)]).astype(np.float32)
    got = np.asarray(invert(jnp.asarray(uniform), jnp.asarray(np.tile(weights, (len(uniform), 1)))))
    want = search(uniform, weights)
    assert (weights[got] > 0).all()
    assert np.mean(got != want) < 0.002
    edges = np.concatenate([[0], np.cumsum(weights.astype(np.float64)) / weights.sum()])
    assert (uniform >= edges[got] - 1e-6).all()
    assert (uniform <= edges[got + 1] + 1e-6).all()


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=V, max_size=V))
@example([0.0] * (V - 1) + [1.0])
@example([1.0] + [0.0] * (V - 1))
@example([0.0, 1.0, 1e-30, 0.0, 0.0, 0.0, 0.0])
def test_an_entry_without_weight_is_never_drawn(weights: list[float]) -> None:
    assume(any(weights))
    tiled = jnp.tile(jnp.asarray(weights, jnp.float32), (len(EDGES), 1))
    got = invert(jnp.asarray(EDGES, jnp.float32), tiled)
    assert all(weights[i] > 0 for i in got.tolist())


def reference(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray | None:
    """Which tokens stay; None where rounding decides. Top-k first, top-p of what it left."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    keep = np.ones(V, bool)
    if top_k:
        keep &= p >= np.sort(p)[::-1][min(top_k, V) - 1]
    left = np.where(keep, p, 0)
    mass = np.cumsum(np.sort(left)[::-1]) / left.sum()
    if top_p < 1:
        if np.abs(mass - top_p).min() < 1e-5:
            return None
        keep &= p >= np.sort(left)[::-1][np.argmax(mass >= top_p)]
    if np.abs(p - min_p).min() < 1e-5:
        return None
    return keep & (p >= min_p)


@jax.jit
def kept(logits: jax.Array, top_p: jax.Array, min_p: jax.Array) -> list[jax.Array]:
    """Without top-k, with 1, 3 and more than there are."""
    return [
        keep_likely(logits, Sampling(1, top_k=k, top_p=top_p, min_p=min_p)) for k in (0, 1, 3, 9)
    ]


@given(
    st.lists(st.sampled_from([-9.0, -1.0, 0.0, 0.5, 2.0, 2.5]), min_size=V, max_size=V),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.99),
)
@example([0.0] * V, 0.5, 0.0)
@example([2.0, 2.0, 2.0, 2.0, -9.0, -9.0, -9.0], 0.3, 0.0)
def test_filters_keep_what_the_reference_keeps(
    values: list[float], top_p: float, min_p: float
) -> None:
    """Ties included: few levels make many of them. Kept logits stay as they were."""
    logits = np.array(values, np.float32)
    arrays = (jnp.asarray(x, jnp.float32) for x in (top_p, min_p))
    for k, out in zip((0, 1, 3, 9), kept(jnp.asarray(logits)[None], *arrays), strict=True):
        keep = reference(logits, k, top_p, min_p)
        if keep is not None:
            np.testing.assert_array_equal(out[0], np.where(keep, logits, -np.inf))


@pytest.mark.parametrize("as_array", [False, True])
def test_settings_that_keep_all_change_nothing(as_array: bool) -> None:
    logits = jnp.asarray([[0.0, 1.0, -2.0, 3.0, 0.5, 0.5, -1.0]])
    one, zero = (jnp.asarray(x) if as_array else x for x in (1.0, 0.0))
    out = keep_likely(logits, Sampling(1, top_p=one, min_p=zero))
    np.testing.assert_array_equal(out, logits)


def many(logits: list[float], sampling: Sampling, n: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probabilities, n draws from the same logits."""
    tiled = jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1))
    tokens, logps = jitted(jr.split(jr.key(5), n), tiled, sampling)
    return np.asarray(tokens), np.asarray(logps)


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = len(tokens) * p[p > 0]
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, -np.inf]
    p = np.exp(np.array(logits) / temperature)
    p /= p.sum()
    tokens, logps = many(logits, Sampling(1, jnp.asarray(temperature)))
    assert chi_square(tokens, p) < 16.27  # 3 degrees of freedom, one in a thousand
    np.testing.assert_allclose(logps, np.log(p[tokens]), rtol=1e-5)


def test_filtered_draws_have_the_log_probability_of_the_full_support() -> None:
    """p = [.5, .3, .15, .05], top-p .75 keeps [.5, .3]: the ratio to training's log π is 1."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    tokens, logps = many(np.log(p).tolist(), Sampling(1, top_p=0.75))
    assert chi_square(tokens, np.array([0.625, 0.375, 0, 0])) < 10.83
    np.testing.assert_allclose(logps[tokens == 0], -0.693147, atol=1e-6)
    np.testing.assert_allclose(np.exp(np.log(p[tokens]) - logps), 1, rtol=1e-5)


@pytest.mark.parametrize("zero", [0.0, jnp.asarray(0.0)])
def test_temperature_zero_is_greedy(zero: Any) -> None:
    """As a number and as an array: the likeliest, the first of equals, its log π at 1."""
    logits = [0.0, 2.0, -1.0, 2.0]
    tokens, logps = many(logits, Sampling(1, zero, top_k=1, top_p=jnp.asarray(0.5)), n=8)
    assert tokens.tolist() == [1] * 8
    want = 2 - np.log(1 + 2 * np.exp(2) + np.exp(-1))
    np.testing.assert_allclose(logps, want, rtol=1e-5)


def test_a_row_draws_by_its_own_key() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, V)), jnp.float32)
    keys = jr.split(jr.key(0), 6)
    order = np.array([3, 5, 0, 1, 4, 2])
    one = jitted(keys, logits, Sampling(1))
    other = jitted(keys[order], logits[order], Sampling(1))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], b)


def test_log_probabilities_of_extreme_logits() -> None:
    tokens, logps = many([1e4, -1e4, 0.0], Sampling(1), n=8)
    assert tokens.tolist() == [0] * 8
    np.testing.assert_array_equal(logps, np.zeros(8))


@pytest.mark.parametrize(
    ("bad", "law"),
    [
        ({"max_tokens": 0}, "max_tokens ≥ 1"),
        ({"temperature": -0.1}, "temperature ≥ 0"),
        ({"top_k": -1}, "top_k ≥ 0"),
        ({"top_p": 0.0}, "0 < top_p ≤ 1"),
        ({"top_p": 1.5}, "0 < top_p ≤ 1"),
        ({"min_p": -0.1}, "0 ≤ min_p ≤ 1"),
        ({"min_p": 1.1}, "0 ≤ min_p ≤ 1"),
    ],
)
def test_impossible_settings_are_errors(bad: dict[str, Any], law: str) -> None:
    with pytest.raises(ValueError, match=f"expected {law}, got Sampling"):
        Sampling(**{"max_tokens": 4, **bad})


def test_the_block_that_ships_splits_a_real_vocabulary() -> None:
    assert 49152 % module.BLOCK == 0
