"""Guesses change how many steps a row takes, never what it says or how likely it is."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.models import Config, Decoder, init_decoder
from purepost.rollout.draw import Sampling, draw
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.requests import Result, as_completions, requests_for
from purepost.rollout.sample import generate, pad_prompts
from purepost.rollout.speculative import guess, right_so_far
from purepost.types import causal_rows


def guessed(tokens: list[int], *, ngram: int, count: int) -> list[int]:
    """By a search: the latest place before the last token that agrees in most of the last n."""
    last = len(tokens) - 1

    def agreement(place: int) -> int:
        n = 0
        while n < ngram and n <= place and tokens[place - n] == tokens[last - n]:
            n += 1
        return n

    place = max(range(last), key=lambda i: (agreement(i), i))
    out = list(tokens)
    for _ in range(count):
        out.append(out[len(out) - (last - place)])
    return out[last + 1 :]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.integers(1, 3), st.integers(1, 5))
def test_guesses_continue_the_last_place_that_was_alike(
    tokens: list[int], ngram: int, count: int
) -> None:
    padded = jnp.asarray([tokens + [9] * (12 - len(tokens))] * 2, jnp.int32)
    last = jnp.full(2, len(tokens) - 1, jnp.int32)
    got = guess(padded, last, ngram=ngram, count=count)
    assert got.tolist() == [guessed(tokens, ngram=ngram, count=count)] * 2


def test_draws_count_up_to_the_first_wrong_guess() -> None:
    guesses = jnp.asarray([[1, 2, 3], [1, 2, 3], [0, 2, 3]])
    drawn = jnp.asarray([[1, 2, 3, 4], [1, 5, 3, 4], [1, 2, 3, 4]])
    counts = right_so_far(guesses, drawn)
    assert counts.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]


def test_rejection_is_sampling_from_the_residual() -> None:
    """The draw is the guess with its probability p(d); when it is not, it has the distribution
    p(· | not d) = max(p − q, 0) / Σ, for q that is sure of d. Over a fine grid of what decides.
    """
    p, d, n = np.array([0.5, 0.2, 0.3]), 1, 30_000
    keys = jr.split(jr.key(0), n)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (n, 3))
    drawn = np.asarray(draw(keys, logits, Sampling(1))[0])
    accepted = drawn == d
    assert accepted.mean() == pytest.approx(p[d], abs=4 * np.sqrt(p[d] * (1 - p[d]) / n))
    q = np.eye(3)[d]
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    found = np.bincount(drawn[~accepted], minlength=3) / (~accepted).sum()
    np.testing.assert_allclose(found, residual, rtol=0, atol=0.015)


@pytest.fixture(scope="module")
def world() -> Decoder:
    """Three tokens, and a model that is far from sure of any."""
    config = Config(3, 8, 8, 1, 2, 1, 4, max_positions=64)
    model = init_decoder(jr.key(1), config)
    return dataclasses.replace(model, embed=model.embed * 12)


@pytest.fixture(scope="module")
def spoken(world: Decoder) -> tuple[list[Result], Engine]:
    """2000 completions of [0, 1, 0] with two guesses at each step."""
    requests = requests_for(jr.key(2), pad_prompts([[0, 1, 0]]), Sampling(3), group=2000)
    engine = Engine(world, Limits(slots=64, room=64, guesses=2, ngram=2, steps=4))
    return engine.run(requests), engine


def test_the_distribution_is_the_models(
    world: Decoder, spoken: tuple[list[Result], Engine]
) -> None:
    """All 27 completions, by enumeration, against how often each came: χ² of 26 degrees."""
    results, engine = spoken
    every = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(27, 3)
    tokens = np.concatenate([np.tile([0, 1, 0], (27, 1)), every], 1)
    rows = causal_rows(jnp.asarray(tokens, jnp.int32), jnp.full(27, 6, jnp.int32))
    logps = jax.nn.log_softmax(world.unembed(world(rows)[0]))[:, 2:5]
    logps = np.take_along_axis(np.asarray(logps), every[..., None], -1)[..., 0]
    expected = np.exp(logps.sum(1)) * len(results)
    assert expected.sum() == pytest.approx(len(results), rel=1e-5)
    assert expected.min() > 5
    index = [int(r.tokens @ [9, 3, 1]) for r in results]
    counts = np.bincount(index, minlength=27)
    assert ((counts - expected) ** 2 / expected).sum() < 54.1  # the .999 quantile
    found = np.stack([r.logps for r in results])
    np.testing.assert_allclose(found, logps[index], rtol=0, atol=1e-5)
    assert engine.stats.drawn == 6000 > 1.15 * engine.stats.busy  # some guesses were right


def test_the_tokens_are_those_of_plain_sampling(
    world: Decoder, spoken: tuple[list[Result], Engine]
) -> None:
    """By the same keys: not only their distribution."""
    prompts = pad_prompts([[0, 1, 0]])
    want = generate(jr.key(2), world, prompts, Sampling(3), group=2000)
    got = as_completions(spoken[0], group=2000, max_tokens=3)
    different = np.asarray((got.tokens != want.tokens).any(-1)).sum()
    assert different <= 2  # a draw within rounding of where one token's share ends


def test_greedy_text_that_repeats_takes_few_steps(model: Decoder) -> None:
    """Greedily this model soon says the same again and again."""
    prompts = pad_prompts([[3, 1, 4], [1, 5]], width=3)
    sampling = Sampling(40, temperature=0.0)
    want = generate(jr.key(0), model, prompts, sampling)
    engine = Engine(model, Limits(slots=2, room=64, guesses=4))
    results = engine.run(requests_for(jr.key(0), prompts, sampling))
    got = as_completions(results, group=1, max_tokens=40)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, rtol=0, atol=2e-5)
    assert engine.stats.busy < 0.5 * engine.stats.drawn == 0.5 * 80
