"""Sampling whole completions: randomness by row, endings, what compiles, prompts as they come."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import PRNGKeyArray

from purepost.models import Decoder
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import (
    LENGTH,
    STOP,
    Completions,
    Prompts,
    bucket,
    generate,
    pad_prompts,
    stages,
)
from purepost.rollout.score import score
from purepost.rollout.stop import StopStrings, stop_strings
from purepost.types import group_rows
from purepost.weights import add_lora, merge

TOKENS = 8
IDS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]
# The whole vocabulary: letters, and a few pairs of them.
VOCABULARY = [bytes([97 + i % 4]) for i in range(15)] + [b"ab", b"ba", b"", b"dd"]
STRINGS = stop_strings(["ab", "cda"], VOCABULARY)

traces = 0


@eqx.filter_jit
def sample(
    key: PRNGKeyArray,
    model: Decoder,
    prompts: Prompts,
    temperature: jax.Array,
    top_p: jax.Array,
    stop: StopStrings,
) -> Completions:
    """Three branches each, ended by the ids 2 and 9 or by a string; counts its traces."""
    global traces
    traces += 1
    sampling = Sampling(TOKENS, temperature, top_p=top_p, stop_ids=(2, 9))
    return generate(key, model, prompts, sampling, group=3, stop=stop)


def run(model: Decoder, prompts: Prompts, **changes: Any) -> Completions:
    settings = {"temperature": 1.0, "top_p": 1.0, "seed": 0, **changes}
    temperature, top_p = (jnp.asarray(settings[k], jnp.float32) for k in ("temperature", "top_p"))
    return sample(jr.key(settings["seed"]), model, prompts, temperature, top_p, STRINGS)


def same(a: Completions, b: Completions) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_prompts(IDS, ids=[7, 0, 12, 3], width=4)


@pytest.fixture(scope="module")
def completions(model: Decoder, prompts: Prompts) -> Completions:
    return run(model, prompts)


def ending(tokens: list[int]) -> tuple[int, int]:
    """(length, finish) of a completion: after the first stop id or completed string, included."""
    for i, token in enumerate(tokens):
        text = b"".join(VOCABULARY[t] for t in tokens[: i + 1])
        if token in (2, 9) or b"ab" in text or b"cda" in text:
            return i + 1, STOP
    return len(tokens), LENGTH


def test_endings_lengths_and_masks(completions: Completions) -> None:
    """All by a search of what was sampled. A stop id is kept; behind the end all is 0."""
    assert completions.tokens.shape == (4, 3, TOKENS)
    finishes = set()
    for place in np.ndindex(4, 3):
        length = int(completions.lengths[place])
        tokens = completions.tokens[place].tolist()
        ended = ending(tokens[:length])
        assert (length, int(completions.finish[place])) == ended
        assert length == TOKENS or ended[1] == STOP
        assert completions.mask[place].tolist() == [i < length for i in range(TOKENS)]
        assert not any(tokens[length:])
        assert not completions.logps[place][length:].any()
        assert (completions.logps[place][:length] < 0).all()
        finishes.add(ended[1])
    assert finishes == {LENGTH, STOP}


def test_same_key_same_bits_other_key_other_tokens(
    model: Decoder, prompts: Prompts, completions: Completions
) -> None:
    assert same(run(model, prompts), completions)
    assert not np.array_equal(run(model, prompts, seed=1).tokens, completions.tokens)


def test_a_row_does_not_depend_on_the_others(
    model: Decoder, prompts: Prompts, completions: Completions
) -> None:
    """Prompts permuted with their ids: completions permuted, to the bit."""
    order = np.array([2, 0, 3, 1])
    moved = run(model, jax.tree.map(lambda x: x[order], prompts))
    assert same(moved, jax.tree.map(lambda x: x[order], completions))


def test_a_row_is_the_same_beside_other_prompts(
    model: Decoder, prompts: Prompts, completions: Completions
) -> None:
    others = pad_prompts([IDS[0], [11, 12], [1], [7, 7, 7]], ids=[7, 1, 2, 4], width=4)
    first = jax.tree.map(lambda x: x[0], run(model, others))
    assert same(first, jax.tree.map(lambda x: x[0], completions))


def test_branches_and_ids_have_randomness_of_their_own(model: Decoder) -> None:
    prompts = pad_prompts([[3, 1]] * 4, ids=[0, 1, 2, 0], width=4)
    tokens = np.asarray(run(model, prompts).tokens)
    assert len({tuple(row) for row in tokens[:3].reshape(9, TOKENS)}) == 9
    np.testing.assert_array_equal(tokens[0], tokens[3])


def test_temperature_and_top_p_compile_once(model: Decoder, prompts: Prompts) -> None:
    run(model, prompts)
    before = traces
    results = [run(model, prompts, temperature=t, top_p=p) for t, p in ((0.5, 1), (0, 1), (1, 0.4))]
    assert traces == before
    greedy = np.asarray(results[1].tokens)
    assert (greedy == greedy[:, :1]).all()
    assert len({np.asarray(c.tokens).tobytes() for c in results}) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_training_scores(
    model: Decoder, prompts: Prompts, temperature: float
) -> None:
    """At the temperature over the full support, though top-p left most of it out."""
    c = run(model, prompts, temperature=temperature, top_p=0.8)
    rows = group_rows(prompts.tokens, prompts.lengths, c.tokens, c.lengths, c.mask)
    temperatures = jnp.full(4, temperature, jnp.float32)
    logps = eqx.filter_jit(score)(model, rows, temperature=temperatures).logps
    np.testing.assert_allclose(logps[:, 4:].reshape(c.logps.shape), c.logps, rtol=0, atol=1e-5)


def test_long_completions_go_on_as_their_cache_grows(model: Decoder, prompts: Prompts) -> None:
    """60 tokens: a cache of 32, then of 64; log-probabilities are training's throughout."""
    assert stages(60) == [32, 64]
    c = generate(jr.key(0), model, prompts, Sampling(60), group=2)
    assert (c.lengths == 60).all()
    rows = group_rows(prompts.tokens, prompts.lengths, c.tokens, c.lengths, c.mask)
    logps = eqx.filter_jit(score)(model, rows).logps
    np.testing.assert_allclose(logps[:, 4:].reshape(c.logps.shape), c.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [(1, [16]), (31, [32]), (64, [32, 64]), (128, [32, 64, 128]), (1000, [256, 512, 1008])],
)
def test_caches_grow_in_few_sizes(slots: int, sizes: list[int]) -> None:
    assert stages(slots) == sizes


def test_adapters_sample_as_their_merged_model(model: Decoder, prompts: Prompts) -> None:
    adapted = add_lora(model, rank=2, key=jr.key(1))
    bs = lambda m: [m.layers.attention.q.b, m.layers.mlp.up.b]  # noqa: E731
    adapted = eqx.tree_at(bs, adapted, [jnp.full(b.shape, 0.5) for b in bs(adapted)])
    got, want = run(adapted, prompts), run(merge(adapted), prompts)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, rtol=0, atol=1e-6)
    assert not np.array_equal(got.tokens, run(model, prompts).tokens)


@pytest.mark.parametrize(
    ("script", "length", "finish"), [([7, 9, 0, 0], 2, STOP), ([7, 8, 8, 8], 4, LENGTH)]
)
def test_endings_with_two_stop_ids(
    model: Decoder, script: list[int], length: int, finish: int
) -> None:
    """A model made to say the script: [7, 9] ended, [7, 8, 8, 8] cut; masks come from lengths."""
    silent = jax.tree.map(jnp.zeros_like, model.layers)  # hidden states are the normed embeddings
    embed = jnp.asarray(np.random.default_rng(0).normal(size=(19, 10)), jnp.float32)
    normed = np.asarray(embed) / np.sqrt((np.asarray(embed) ** 2).mean(-1, keepdims=True))
    # The last token of the prompt is 1; each token points at the one after it.
    chain = {1: script[0]} | dict(zip(script[:-1], script[1:], strict=True))
    targets = np.zeros((19, 19), np.float32)
    for token, following in chain.items():
        targets[token, following] = 50
    head = np.linalg.pinv(normed[list(chain)]) @ targets[list(chain)]
    parts = (silent, embed, jnp.ones(10), jnp.asarray(head, jnp.float32))
    speaker = eqx.tree_at(
        lambda m: (m.layers, m.embed, m.norm, m.head), model, parts, is_leaf=lambda x: x is None
    )
    sampling = Sampling(4, temperature=jnp.asarray(0.0), stop_ids=(2, 9))
    c = generate(jr.key(0), speaker, pad_prompts([[4, 1]], width=2), sampling)
    assert c.tokens[0, 0].tolist() == script
    assert c.mask[0, 0].tolist() == [i < length for i in range(4)]
    assert (int(c.lengths[0, 0]), int(c.finish[0, 0])) == (length, finish)


def test_one_token_is_enough(model: Decoder, prompts: Prompts) -> None:
    c = generate(jr.key(0), model, prompts, Sampling(1, jnp.asarray(1.0)), group=3)
    assert c.tokens.shape == (4, 3, 1)
    assert (c.lengths == 1).all()


@given(st.integers(1, 3000), st.sampled_from([2, 8, 24, 32]))
def test_buckets_are_few_and_near(length: int, step: int) -> None:
    """1, 1½, 2, 3, 4, 6, … times the step: at most half more than asked."""
    size = bucket(length, step)
    powers = [step * 2**n for n in range(13)]
    assert size in {*powers, *(p * 3 // 2 for p in powers)}
    assert length <= size <= max(step, 1.5 * length)
    assert bucket(size, step) == size


def test_bucket_sizes() -> None:
    lengths = (1, 32, 33, 48, 49, 65, 97, 129, 193)
    assert [bucket(n) for n in lengths] == [32, 32, 48, 48, 64, 96, 128, 192, 256]


def test_prompts_as_arrays() -> None:
    prompts = pad_prompts([[5, 6, 7], [8]], ids=[4, 2])
    assert prompts.tokens.shape == (2, 32)
    assert prompts.tokens[:, :4].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert (prompts.lengths.tolist(), prompts.ids.tolist()) == ([3, 1], [4, 2])
    assert pad_prompts([[1]] * 3).ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "expected at least one prompt, got none"),
        ([[1], []], "expected prompts of 1 to 4 tokens, got 0 in prompt 1"),
        ([[1], [2], [1, 2, 3, 4, 5]], "got 5 in prompt 2; shorten or drop it, or widen"),
    ],
)
def test_prompts_that_do_not_fit_are_errors(bad: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_prompts(bad, width=4)
