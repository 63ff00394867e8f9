"""Decoding with a cache gives what a forward pass over all tokens gives (case 14)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder
from purepost.models.cache import Cache, decode, grow, prefill, unstack
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import generate, pad_prompts
from purepost.types import causal_rows, group_rows

LENGTHS, GROUP, TIME = [6, 1, 4], 2, 5


def integers(x: np.ndarray | list[int]) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


PROMPTS = integers(np.random.default_rng(2).integers(0, 19, (3, 6)))
BRANCHES = integers(np.random.default_rng(3).integers(0, 19, (3, GROUP, TIME)))

first = eqx.filter_jit(lambda m: prefill(m, PROMPTS, integers(LENGTHS), GROUP, TIME))


@eqx.filter_jit
def following(
    model: Decoder, cache: Cache, tokens: jax.Array, step: jax.Array
) -> tuple[jax.Array, Cache]:
    return decode(model, unstack(model), cache, tokens, step)


@eqx.filter_jit
def forced(model: Decoder) -> tuple[jax.Array, jax.Array]:
    """Hidden states of the prompts' last tokens and of all the branches' tokens, in one pass."""
    full = jnp.full((3, GROUP), TIME, jnp.int32)
    lengths = integers(LENGTHS)
    rows = group_rows(PROMPTS, lengths, BRANCHES, full, jnp.ones(BRANCHES.shape, bool))
    hidden = model(rows)[0]
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    return last, hidden[:, 6:].reshape(3, GROUP, TIME, -1)


def decoded(model: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states after the prompts, and after each token of the branches, with a cache."""
    last, cache = first(model)
    steps = []
    for i in range(TIME):
        hidden, cache = following(model, cache, BRANCHES[:, :, i], jnp.asarray(i, jnp.int32))
        steps.append(np.asarray(hidden))
    return np.asarray(last), np.stack(steps, 2)


def test_every_step_equals_teacher_forcing(model: Decoder) -> None:
    """Prompts of 6, 1 and 4 tokens, two branches each."""
    for got, want in zip(decoded(model), forced(model), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_nothing_stale_is_left_after_an_optimizer_step(model: Decoder) -> None:
    before = decoded(model)
    moved = jax.tree.map(lambda x: x * 0.9 + 0.01, model)
    after = decoded(moved)
    assert np.abs(after[1] - before[1]).max() > 0.01
    for got, want in zip(after, forced(moved), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(decoded(model), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_lies_behind_a_prompt_is_not_read(model: Decoder) -> None:
    """The slots after a short prompt's end, and the branch's slots still to come."""
    _, cache = first(model)
    noise = jnp.asarray(1e3, jnp.float32)
    behind = jnp.arange(6) >= integers(LENGTHS)[:, None]
    layers = [
        eqx.tree_at(
            lambda x: (x.prefix_k, x.branch_k, x.branch_v),
            layer,
            (
                jnp.where(behind[:, None, None, :], noise, layer.prefix_k),
                layer.branch_k + noise,
                layer.branch_v + noise,
            ),
        )
        for layer in cache.layers
    ]
    dirty = eqx.tree_at(lambda c: c.layers, cache, layers)
    hidden, _ = following(model, cache, BRANCHES[:, :, 0], jnp.zeros((), jnp.int32))
    again, _ = following(model, dirty, BRANCHES[:, :, 0], jnp.zeros((), jnp.int32))
    np.testing.assert_array_equal(hidden, again)


def test_a_cache_grown_between_steps_gives_the_same(model: Decoder) -> None:
    """Room for two tokens, filled, then for all."""
    _, cache = eqx.filter_jit(lambda m: prefill(m, PROMPTS, integers(LENGTHS), GROUP, 2))(model)
    for i in range(TIME):
        if i == 2:
            cache = grow(cache, TIME)
        hidden, cache = following(model, cache, BRANCHES[:, :, i], jnp.asarray(i, jnp.int32))
        np.testing.assert_allclose(hidden, forced(model)[1][:, :, i], rtol=1e-5, atol=1e-5)


def test_greedy_decoding_equals_decoding_without_a_cache(model: Decoder) -> None:
    """Each next token is the likeliest of a forward pass over all tokens so far."""
    prompts = pad_prompts([[3, 1, 4, 1, 5, 9], [2], [6, 5, 3, 5]], width=6)
    tokens = np.asarray(generate(jr.key(0), model, prompts, Sampling(5, temperature=0.0)).tokens)
    ids = np.zeros((3, 11), np.int32)
    ids[:, :6] = prompts.tokens
    for row, start, new in zip(ids, (6, 1, 4), tokens[:, 0], strict=True):
        row[start : start + 5] = new
    lengths = integers([11, 6, 9])
    hidden = eqx.filter_jit(lambda m, x: m(causal_rows(x, lengths))[0])(model, integers(ids))
    best = np.argmax(np.asarray(model.unembed(hidden)), -1)
    for i, start in enumerate((6, 1, 4)):
        np.testing.assert_array_equal(best[i, start - 1 : start + 4], tokens[i, 0])


def test_a_window_that_would_overflow_is_an_error_up_front(model: Decoder) -> None:
    """max_positions is 64: 6 + 58 fit, one more does not."""
    prompts = pad_prompts([[1, 2, 3]], width=6)
    with pytest.raises(ValueError, match=r"max_tokens ≤ 64 positions, got 6 \+ 59; shorten"):
        generate(jr.key(0), model, prompts, Sampling(59))
    shape = eqx.filter_eval_shape(generate, jr.key(0), model, prompts, Sampling(58))
    assert shape.tokens.shape == (1, 1, 58)
