"""Noise on embeddings: when, how much, and whose."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from experiments.probes import tiny
from purepost.models.neftune import Neftune
from purepost.rollout.score import score
from purepost.types import causal_rows

DECODER = tiny(lora=False)
ROWS = causal_rows(
    jnp.asarray([[3, 4, 5, 6], [7, 8, 9, 0]]), jnp.asarray([4, 3]), ids=jnp.asarray([7, 2])
)


def test_without_a_key_it_is_the_decoder_itself():
    np.testing.assert_array_equal(Neftune(DECODER)(ROWS)[0], DECODER(ROWS)[0])
    np.testing.assert_array_equal(score(Neftune(DECODER), ROWS).logps, score(DECODER, ROWS).logps)


def test_the_noise_belongs_to_the_row():
    model, key = Neftune(DECODER), jr.key(3)
    first, _ = model(ROWS, key=key)
    swapped = causal_rows(ROWS.tokens[::-1], jnp.asarray([3, 4]), ids=ROWS.ids[::-1])
    again, _ = model(swapped, key=key)
    np.testing.assert_allclose(again[::-1], first, rtol=1e-5, atol=1e-5)
    assert (np.asarray(model(ROWS, key=jr.key(4))[0]) != np.asarray(first)).any()


def test_the_noise_is_uniform_and_its_size_known(monkeypatch):
    """±α/√(T d): T is 4 and 3, d 16. Read off the embeddings that the layers get."""
    seen = []
    real = type(DECODER).lookup

    def lookup(self, tokens):
        seen.append(real(self, tokens))
        return seen[-1]

    monkeypatch.setattr(type(DECODER), "lookup", lookup)
    Neftune(DECODER, alpha=2)(ROWS, key=jr.key(0))
    noise = np.asarray(seen[0]) - np.asarray(DECODER.embed[ROWS.tokens])
    for row, tokens in enumerate((4, 3)):
        bound = 2 / np.sqrt(tokens * 16)
        assert 0.8 * bound < np.abs(noise[row]).max() <= bound + 1e-6
        np.testing.assert_allclose(noise[row].std(), bound / np.sqrt(3), rtol=0.2)


def test_no_noise_of_no_size():
    with pytest.raises(ValueError, match="alpha > 0"):
        Neftune(DECODER, alpha=0.0)
