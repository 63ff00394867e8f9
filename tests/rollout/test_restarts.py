"""An episode whose text was rewritten between turns: several continuations of its prompt, and one
episode in every statistic and every mean.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from purepost.losses import sequence_mean, token_mean
from purepost.mean import spans_of
from purepost.models import Decoder
from purepost.rollout.collect import Episodes, to_rows
from purepost.rollout.sample import STOP, pad_prompts
from purepost.rollout.score import score
from purepost.types import causal_rows, check_rows

PROMPT = [4, 5, 6]
# Of the first episode, what stands behind the prompt in each of three renderings, and how many
# tokens at its end were sampled then.
PARTS = [([7, 8], 2), ([9, 10, 11], 1), ([12, 13, 14, 15], 3)]
OTHER = [16, 17, 18]


def episodes() -> Episodes:
    tokens = np.zeros((2, 10), np.int32)
    mask, restarts = np.zeros((2, 10), bool), np.zeros((2, 10), bool)
    at = 0
    for text, sampled in PARTS:
        tokens[0, at : at + len(text)] = text
        restarts[0, at] = at > 0
        at += len(text)
        mask[0, at - sampled : at] = True
    tokens[1, :3], mask[1, :3] = OTHER, True
    n = jnp.zeros(2, jnp.int32)
    return Episodes(
        prompts=pad_prompts([PROMPT], width=5),
        group=n,
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([9, 3], jnp.int32),
        mask=jnp.asarray(mask),
        logps=jnp.zeros((2, 10)),
        rewards=jnp.asarray([1.0, 0.0]),
        finish=n + STOP,
        temperature=jnp.ones(2),
        restarts=jnp.asarray(restarts),
    )


def test_each_continuation_sees_the_prompt_and_itself(model: Decoder) -> None:
    given = episodes()
    rows, _ = to_rows(given)
    check_rows(rows)
    found = np.asarray(score(model, rows).logps)[0, given.prompts.tokens.shape[1] :]
    texts = [*PARTS, (OTHER, 3)]
    tokens, said = np.zeros((4, 8), np.int32), np.zeros((4, 8), bool)
    for i, (text, sampled) in enumerate(texts):
        n = len(PROMPT + text)
        tokens[i, :n] = PROMPT + text
        said[i, n - sampled : n] = True
    lengths = jnp.asarray([len(PROMPT + text) for text, _ in texts], jnp.int32)
    alone = score(model, causal_rows(jnp.asarray(tokens), lengths, jnp.asarray(said))).logps
    alone = np.asarray(alone)[said]
    np.testing.assert_allclose(found[found != 0], alone, rtol=1e-5)
    assert len(alone) == 2 + 1 + 3 + 3


def test_it_is_one_episode_in_every_mean() -> None:
    rows, places = to_rows(episodes())
    spans = spans_of(rows)
    assert spans.lengths.tolist() == [[6, 3]]
    losses = places.per_token(jnp.asarray([[1.0] * 10, [5.0] * 10]))
    assert float(sequence_mean(losses, spans).value) == (1 + 5) / 2
    assert float(token_mean(losses, spans).value) == pytest.approx((6 * 1 + 3 * 5) / 9)


def test_no_restart_is_the_plain_row() -> None:
    plain = episodes()
    bare = dataclasses.replace(plain, restarts=None)
    none = dataclasses.replace(plain, restarts=jnp.zeros((2, 10), bool))
    for name, x in vars(to_rows(bare)[0]).items():
        np.testing.assert_array_equal(x, vars(to_rows(none)[0])[name])
