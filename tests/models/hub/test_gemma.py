"""Gemma 3 270M in Q4_K_M, a real quantised file of another family than the default model's.

Google's Gemma terms of use apply to it, so no test fetches it: `load("gemma3-270m")` does, when its
user asks. `make test-slow` then runs these.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.models.hub import Loaded, load
from purepost.models.hub.fetch import GEMMA, PACKAGED, cache_directory
from purepost.types import causal_rows

FILE = cache_directory() / GEMMA / PACKAGED[GEMMA].file
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason='load("gemma3-270m") has not fetched it'),
]

# What transformers 5.24 makes of the same file (its own reader, float32): the likeliest next token
# and its logit, in a row that goes past the window of 512 tokens.
ROW = [2, 818, 5279, 529, 7001, 563, *range(5000, 5600)]
POSITIONS = [0, 1, 5, 100, 511, 512, 513, 600]
BEST = [184, 236743, 506, 236748, 236743, 236743, 236743, 524]
LOGITS = [14.5218, 20.3024, 19.0914, 8.8609, 9.9324, 8.9053, 10.0519, 12.1006]


@pytest.fixture(scope="module")
def gemma() -> Loaded:
    return load(GEMMA)


@eqx.filter_jit
def logits_at(model, rows, positions):
    return model.unembed(model(rows)[0][0, positions])


def test_logits_equal_transformers(gemma: Loaded) -> None:
    rows = causal_rows(jnp.array([ROW], jnp.int32), jnp.array([len(ROW)], jnp.int32))
    got = np.asarray(logits_at(gemma.model, rows, jnp.array(POSITIONS, jnp.int32)))
    assert got.argmax(-1).tolist() == BEST
    np.testing.assert_allclose(got.max(-1), LOGITS, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Question: What color is the sky on a clear day?\nAnswer:", " Blue"),
        ("Question: What is the capital of France?\nAnswer:", " Paris"),
        ("Paris is the capital of", " France"),
    ],
)
def test_questions_are_answered(gemma: Loaded, question: str, answer: str) -> None:
    """Greedily, as many tokens as the answer has."""
    model, tokenizer = gemma
    ids = tokenizer.encode(question, add_special=True)
    assert ids[0] == tokenizer.bos_id == 2
    prompt = len(ids)
    for _ in tokenizer.encode(answer):
        padded = jnp.array([ids + [0] * (32 - len(ids))], jnp.int32)
        rows = causal_rows(padded, jnp.array([len(ids)], jnp.int32))
        best = logits_at(model, rows, jnp.array([len(ids) - 1], jnp.int32)).argmax()
        ids.append(int(best))
    assert tokenizer.decode(ids[prompt:]) == answer
