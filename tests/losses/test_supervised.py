"""Supervised losses: float64 twins from logits, and the gradient through the chunked head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.probes import tiny
from purepost.losses.supervised import label_smoothed, probability, squared_normalizer
from purepost.rollout.score import score
from purepost.types import causal_rows

MODEL = tiny(lora=False)
ROWS = causal_rows(jnp.asarray([[3, 4, 5, 6, 0], [7, 8, 0, 0, 0]]), jnp.asarray([4, 2]))


def twin_logits() -> np.ndarray:
    """What each trained token was predicted from, [n, v] in float64, and the tokens."""
    hidden, _ = MODEL(ROWS)
    logits = np.asarray(MODEL.unembed(hidden), np.float64)
    return np.concatenate([logits[0, :3], logits[1, :1]])


TOKENS = np.array([4, 5, 6, 8])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_statistics_of_the_whole_vocabulary(temperature):
    logits = twin_logits() / temperature
    normalizer = np.log(np.exp(logits).sum(-1))
    logp = logits - normalizer[:, None]
    found = score(MODEL, ROWS, temperature=jnp.full(2, temperature), chunk=2, whole=True)
    assert found.mean_logps is not None and found.normalizers is not None
    mask = np.asarray(ROWS.mask)
    for got, expected in [
        (found.logps, logp[np.arange(4), TOKENS]),
        (found.mean_logps, logp.mean(-1)),
        (found.normalizers, normalizer),
    ]:
        np.testing.assert_allclose(np.asarray(got)[mask], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(got)[~mask], 0.0)
    plain = score(MODEL, ROWS)
    assert plain.mean_logps is None and plain.normalizers is None


def test_the_chunked_gradient_is_that_of_whole_logits():
    def chunked(embed, head):
        model = MODEL.__class__(embed, MODEL.layers, MODEL.norm, head, MODEL.config)
        scores = score(model, ROWS, chunk=2, whole=True)
        assert scores.mean_logps is not None and scores.normalizers is not None
        smoothed = label_smoothed(scores.logps, scores.mean_logps, epsilon=0.3)
        return (smoothed + 0.2 * squared_normalizer(scores.normalizers)).sum()

    def whole(embed, head):
        model = MODEL.__class__(embed, MODEL.layers, MODEL.norm, head, MODEL.config)
        hidden, _ = model(ROWS)
        logits = jnp.concatenate([model.unembed(hidden)[0, :3], model.unembed(hidden)[1, :1]])
        targets = 0.7 * jax.nn.one_hot(TOKENS, 12) + 0.3 / 12
        normalizer = jax.nn.logsumexp(logits, -1)
        return (-(targets * jax.nn.log_softmax(logits)).sum(-1) + 0.2 * normalizer**2).sum()

    got, expected = (
        jax.value_and_grad(f, (0, 1))(MODEL.embed, MODEL.head) for f in (chunked, whole)
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_dynamic_fine_tuning_is_that_of_probability():
    logps = jnp.log(jnp.asarray([[0.8, 0.1]]))
    grad = jax.grad(lambda x: (-probability(x) * x).sum())(logps)
    np.testing.assert_allclose(grad, [[-0.8, -0.1]], rtol=1e-6)
