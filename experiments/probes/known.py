"""Probes of preferences that a known reward has made: what they learn should order completions as
it does, those too that were never compared.

Two prompts have four completions each, whose rewards are a step of ln 3 apart: of two neighbours
the better one is preferred three times in four, and only neighbours are compared.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from purepost import Algorithm, algorithms
from purepost.mean import Metrics
from purepost.models.containers import with_reference
from purepost.models.heads import reward_model, value_model
from purepost.rollout.labelled import Judged, Pairs, Steps
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows, group_rows

from .probe import Measure, Probe

STEP = np.log(3)
REWARDS = STEP * np.array([1.5, 0.5, -0.5, -1.5])
PROMPTS, SIZES = np.array([[3, 0], [4, 3]], np.int32), np.array([1, 2], np.int32)
# From the best to the worst, which depends on the prompt.
FIRST = np.array([[5, 6, 7, 8], [7, 5, 8, 6]], np.int32)
LAST, DRAWS = 9, 4


def _pair_rows(prompt: np.ndarray, ranks: np.ndarray, ids: np.ndarray) -> Rows:
    """Rows of two completions: of `prompt[i]` those of ranks `ranks[i]`."""
    first = FIRST[prompt[:, None], ranks]
    branches = np.stack([first, np.full_like(first, LAST)], -1)
    lengths = jnp.full(ranks.shape, 2, jnp.int32)
    return group_rows(
        jnp.asarray(PROMPTS[prompt]),
        jnp.asarray(SIZES[prompt]),
        jnp.asarray(branches),
        lengths,
        jnp.ones(branches.shape, bool),
        ids=jnp.asarray(ids, jnp.int32),
    )


def _plain_rows(*, only_last: bool = False) -> Rows:
    """Every completion in a row of its own behind its prompt, from the best of the first prompt to
    the worst of the second; trained on its tokens, or on the last alone.
    """
    begins, tokens = np.repeat(SIZES, 4), np.zeros((8, 4), np.int32)
    for row, begin in enumerate(begins):
        tokens[row, :begin] = PROMPTS[row // 4, :begin]
        tokens[row, begin : begin + 2] = FIRST.flat[row], LAST
    mask = np.arange(4) >= (begins + only_last)[:, None]
    return causal_rows(jnp.asarray(tokens), jnp.asarray(begins + 2, jnp.int32), jnp.asarray(mask))


def compared(seed: int) -> Callable[[int], Pairs]:
    """Every pair of neighbours, as often as `DRAWS`, with a preference drawn each time."""

    def data(step: int) -> Pairs:
        n = 6 * DRAWS
        prompt, better = np.repeat([0, 1], n // 2), np.tile([0, 1, 2], n // 3)
        right = np.random.default_rng((seed, step)).random(n) < 0.75
        ranks = np.stack([np.where(right, better, better + 1), np.where(right, better + 1, better)])
        rows = _pair_rows(prompt, ranks.T, n * step + np.arange(n))
        return Pairs(rows, jnp.zeros(n), jnp.ones(n, bool))

    return data


def _judgements(seed: int, step: int) -> np.ndarray:
    """Whether each completion is found good, with the log-odds of its reward."""
    chance = np.tile(1 / (1 + np.exp(-REWARDS)), 2 * DRAWS)
    return np.random.default_rng((seed, step)).random(8 * DRAWS) < chance


def _often(rows: Rows, step: int) -> Rows:
    """The rows `DRAWS` times over, each with an id of its own."""
    n = 8 * DRAWS
    many = jax.tree.map(lambda x: jnp.concatenate([x] * DRAWS), rows)
    return replace(many, ids=jnp.arange(n * step, n * (step + 1), dtype=jnp.int32))


def judged(seed: int) -> Callable[[int], Judged]:
    """Every completion, as often as `DRAWS`, with a judgement drawn each time."""

    def data(step: int) -> Judged:
        good = jnp.asarray(_judgements(seed, step))
        return Judged(_often(_plain_rows(), step), good, jnp.ones(good.shape, bool))

    return data


def solved(seed: int) -> Callable[[int], Steps]:
    """The same as solutions of one step, which ends with the completion."""

    def data(step: int) -> Steps:
        rows = _often(_plain_rows(only_last=True), step)
        return Steps(rows, rows.mask & jnp.asarray(_judgements(seed, step))[:, None])

    return data


def by_ratio(models: Any, metrics: Metrics, data: Any) -> Float[Array, "p k"]:
    """log π(y)/π_ref(y) of every completion, in nats, from best to worst: DPO's reward."""
    rows = _plain_rows()
    both = (score(models.policy, rows).logps, score(models.reference, rows).logps)
    return (both[0] - both[1]).sum(1).reshape(2, 4)


def by_likelihood(models: Any, metrics: Metrics, data: Any) -> Float[Array, "p k"]:
    """log π(y), where there is no reference."""
    return score(models.policy, _plain_rows()).logps.sum(1).reshape(2, 4)


def by_score(models: Any, metrics: Metrics, data: Any) -> Float[Array, "p k"]:
    """A reward model's own."""
    return models(_plain_rows()).reshape(2, 4)


def by_step(models: Any, metrics: Metrics, data: Any) -> Float[Array, "p k"]:
    """A process reward model's log-odds at the only step's end."""
    rows = _plain_rows(only_last=True)
    return jnp.where(rows.mask, models.after(rows), 0.0).sum(1).reshape(2, 4)


def _known(
    build: Callable[..., Algorithm],
    measure: Measure = by_ratio,
    *,
    data: Callable[[int], Callable[[int], Any]] = compared,
    models: Callable[[Any], Any] = with_reference,
    **options: Any,
) -> Probe:
    return Probe(build.__name__, build, models, data, measure, "reward", options=options)


KNOWN: dict[str, Probe] = {
    "dpo": _known(algorithms.dpo, beta=1.0),
    "orpo": _known(algorithms.orpo, by_likelihood, beta=1.0),
    "simpo": _known(algorithms.simpo, by_likelihood),
    "cpo": _known(algorithms.cpo, by_likelihood, beta=1.0, nll=0.1),
    "kto": _known(algorithms.kto, data=judged, beta=0.1),
    "reward_model": _known(
        algorithms.reward_model, by_score, models=partial(reward_model, jr.key(2))
    ),
    "process_reward_model": _known(
        algorithms.process_reward_model, by_step, data=solved, models=value_model
    ),
}
