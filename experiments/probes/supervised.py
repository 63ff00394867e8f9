"""Probes of rows to imitate: sequences that part at one token, and such as follow from their
beginning.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from purepost import algorithms
from purepost.mean import Metrics, masked_mean
from purepost.models.decoder import Decoder
from purepost.models.neftune import Neftune
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows

from .probe import CONFIG, Probe

LEAST = 0.4 * np.log(2)  # nats per token, of the sequences that part
NOISE = 0.2  # the share of label smoothing
SMOOTHED = 1 - NOISE + NOISE / CONFIG.vocab_size  # what it makes of certainty


def symbols(seed: int, n: int) -> list[int]:
    """n different tokens."""
    return np.random.default_rng(seed).permutation(CONFIG.vocab_size)[:n].tolist()


def forked(seed: int) -> Callable[[int], Rows]:
    """Two sequences, twice each, that part after their first token: [r, a, c, e] and [r, b, e].

    The best a model can do is ln 2 at that token and 0 elsewhere: 4 ln 2 over 10 trained tokens.
    """
    r, a, b, c, e = symbols(seed, 5)

    def data(step: int) -> Rows:
        tokens = np.array([[r, a, c, e, 0], [r, b, e, 0, 0]] * 2, np.int32)
        lengths = jnp.asarray([4, 3, 4, 3], jnp.int32)
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        return causal_rows(jnp.asarray(tokens), lengths, ids=ids)

    return data


def told(seed: int) -> Callable[[int], Rows]:
    """Two sequences, twice each, of which every token follows from those before it."""
    r, s, a, b, c = symbols(seed, 5)

    def data(step: int) -> Rows:
        tokens = jnp.asarray([[r, a, c, b, 0], [s, b, a, 0, 0]] * 2, jnp.int32)
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        return causal_rows(tokens, jnp.asarray([4, 3, 4, 3], jnp.int32), ids=ids)

    return data


def nll(models: Decoder, metrics: Metrics, data: Rows) -> Float[Array, ""]:
    """The loss without dropout."""
    return masked_mean(-score(models, data).logps, data.mask).value


def off_smoothing(models: Any, metrics: Metrics, data: Rows) -> Float[Array, ""]:
    """How far the probability of a token is at most from what label smoothing makes of it."""
    p = jnp.exp(score(models, data).logps)
    return jnp.where(data.mask, jnp.abs(p - SMOOTHED), 0.0).max()


def probability(models: Any, metrics: Metrics, data: Rows) -> Float[Array, ""]:
    """The mean probability of a token."""
    return masked_mean(jnp.exp(score(models, data).logps), data.mask).value


def _alone(model: Decoder) -> Decoder:
    return model


PROBES: dict[str, Probe] = {
    "sft": Probe(
        "sft",
        algorithms.sft,
        _alone,
        forked,
        nll,
        "NLL, nats per token",
        LEAST,
        samples=False,
    ),
    "sft, smoothed, on noise": Probe(
        "sft",
        algorithms.sft,
        partial(Neftune, alpha=0.1),
        told,
        off_smoothing,
        f"how far a probability is from {SMOOTHED:.2f}",
        samples=False,
        lora=(False,),
        options={"label_smoothing": NOISE, "z_loss": 1e-4},
    ),
    "dft": Probe(
        "dft",
        algorithms.dft,
        _alone,
        told,
        probability,
        "probability",
        1.0,
        samples=False,
        lora=(False,),
    ),
}
