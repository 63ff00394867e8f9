"""Preferences, judgements and solutions whose best model is known, for the contract's probes."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from purepost.mean import Metrics, Spans
from purepost.rollout.labelled import Judged, Pairs, Steps
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows, group_rows

VOCAB, BETA, WRONG = 12, 1.0, 0.2


def symbols(seed: int) -> list[int]:
    """Six different tokens."""
    return np.random.default_rng(seed).permutation(VOCAB)[:6].tolist()


def real_pairs(rows: Rows, margin: float = 0.0) -> Pairs:
    """Rows of two completions, all of which count."""
    b = rows.tokens.shape[0]
    return Pairs(rows, jnp.full(b, margin), jnp.ones(b, bool))


def paired(seed: int) -> Callable[[int], Pairs]:
    """After [r] the completion [a, c] is better than [b], after [s, r] it is the other way round;
    twice each.
    """
    r, s, a, b, c, _ = symbols(seed)
    prompts = jnp.asarray([[r, 0], [s, r]] * 2, jnp.int32)
    branches = jnp.asarray([[[a, c, 0], [b, 0, 0]], [[b, 0, 0], [a, c, 0]]] * 2, jnp.int32)
    lengths = jnp.asarray([[2, 1], [1, 2]] * 2, jnp.int32)

    def data(step: int) -> Pairs:
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        mask = jnp.ones(branches.shape, bool)
        sizes = jnp.asarray([1, 2, 1, 2], jnp.int32)
        return real_pairs(group_rows(prompts, sizes, branches, lengths, mask, ids=ids))

    return data


def judged(seed: int) -> Callable[[int], Judged]:
    """The same completions, one in each row: those that were chosen are good."""
    r, s, a, b, c, _ = symbols(seed)
    tokens = jnp.asarray([[r, a, c, 0], [r, b, 0, 0], [s, r, b, 0], [s, r, a, c]], jnp.int32)
    lengths = jnp.asarray([3, 2, 3, 4], jnp.int32)
    begins = jnp.asarray([1, 1, 2, 2])[:, None]

    def data(step: int) -> Judged:
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        rows = causal_rows(tokens, lengths, jnp.arange(4) >= begins, ids=ids)
        return Judged(rows, jnp.asarray([True, False, True, False]), jnp.ones(4, bool))

    return data


def told(seed: int) -> Callable[[int], Rows]:
    """Two sequences, twice each, of which every token follows from those before it."""
    r, s, a, b, c, _ = symbols(seed)

    def data(step: int) -> Rows:
        tokens = jnp.asarray([[r, a, c, b, 0], [s, b, a, 0, 0]] * 2, jnp.int32)
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        return causal_rows(tokens, jnp.asarray([4, 3, 4, 3], jnp.int32), ids=ids)

    return data


def margins(models: Any, data: Pairs) -> Float[Array, " b"]:
    """Δ of every row."""
    spans = Spans(data.rows.mask, data.rows.episode, jnp.ones((data.real.shape[0], 2)))
    ratios = spans.sum(score(models.policy, data.rows).logps)
    ratios -= spans.sum(score(models.reference, data.rows).logps)
    return ratios[:, 0] - ratios[:, 1]


def noise_gap(models: Any, metrics: Metrics, data: Pairs) -> float:
    """How far σ(βΔ) is from 1 − ε, the share of labels that are right."""
    share = 1 / (1 + np.exp(-BETA * np.asarray(margins(models, data))))
    return float(np.abs(share - (1 - WRONG)).max())


def loss_gap(models: Any, metrics: Metrics, data: Any) -> float:
    """How far a loss that may come as near 0 as one likes is from it."""
    return float(metrics["loss"].value)


def smooth_gap(models: Any, metrics: Metrics, data: Rows) -> float:
    """How far the probability of a token is from 1 − ε + ε/v."""
    p = np.exp(np.asarray(score(models, data).logps))[np.asarray(data.mask)]
    return float(np.abs(p - (1 - WRONG + WRONG / VOCAB)).max())


def sure_gap(models: Any, metrics: Metrics, data: Rows) -> float:
    """How far the probability of a token is from 1."""
    p = np.exp(np.asarray(score(models, data).logps))[np.asarray(data.mask)]
    return float(1 - p.mean())


def solved(seed: int) -> Callable[[int], Steps]:
    """Solutions of two steps; a step is right if it begins with one token, wrong with another."""
    r, s, a, b, c, _ = symbols(seed)

    def data(step: int) -> Steps:
        tokens = jnp.asarray([[r, a, c, b, c], [r, b, c, 0, 0]] * 2, jnp.int32)
        marks = jnp.asarray([[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]] * 2, bool)
        right = jnp.asarray([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]] * 2, bool)
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        rows = causal_rows(tokens, jnp.asarray([5, 3] * 2, jnp.int32), marks, ids=ids)
        return Steps(rows, right)

    return data
