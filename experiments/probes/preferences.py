"""Probes of preferences, judgements and solutions whose best model is known."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from purepost import Algorithm, algorithms
from purepost.losses import preference
from purepost.mean import Metrics, Spans
from purepost.models.containers import with_reference
from purepost.models.decoder import Decoder
from purepost.models.heads import reward_model, value_model
from purepost.rollout.labelled import Judged, Pairs, Steps
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows, group_rows

from .probe import Measure, Probe
from .supervised import symbols

BETA, WRONG = 1.0, 0.2


def real_pairs(rows: Rows, margin: float = 0.0) -> Pairs:
    """Rows of two completions, all of which count."""
    b = rows.tokens.shape[0]
    return Pairs(rows, jnp.full(b, margin), jnp.ones(b, bool))


def paired(seed: int) -> Callable[[int], Pairs]:
    """After [r] the completion [a, c] is better than [b], after [s, r] it is the other way round;
    twice each.
    """
    r, s, a, b, c = symbols(seed, 5)
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
    r, s, a, b, c = symbols(seed, 5)
    tokens = jnp.asarray([[r, a, c, 0], [r, b, 0, 0], [s, r, b, 0], [s, r, a, c]], jnp.int32)
    lengths = jnp.asarray([3, 2, 3, 4], jnp.int32)
    begins = jnp.asarray([1, 1, 2, 2])[:, None]

    def data(step: int) -> Judged:
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        rows = causal_rows(tokens, lengths, jnp.arange(4) >= begins, ids=ids)
        return Judged(rows, jnp.asarray([True, False, True, False]), jnp.ones(4, bool))

    return data


def solved(seed: int) -> Callable[[int], Steps]:
    """Solutions of two steps; a step is right if it begins with one token, wrong with another."""
    r, s, a, b, c = symbols(seed, 5)

    def data(step: int) -> Steps:
        tokens = jnp.asarray([[r, a, c, b, c], [r, b, c, 0, 0]] * 2, jnp.int32)
        marks = jnp.asarray([[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]] * 2, bool)
        right = jnp.asarray([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]] * 2, bool)
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        rows = causal_rows(tokens, jnp.asarray([5, 3] * 2, jnp.int32), marks, ids=ids)
        return Steps(rows, right)

    return data


def margins(models: Any, data: Pairs) -> Float[Array, " b"]:
    """Δ of every row."""
    spans = Spans(data.rows.mask, data.rows.episode, jnp.ones((data.real.shape[0], 2)))
    ratios = spans.sum(score(models.policy, data.rows).logps)
    ratios -= spans.sum(score(models.reference, data.rows).logps)
    return ratios[:, 0] - ratios[:, 1]


def off_share(models: Any, metrics: Metrics, data: Pairs) -> Float[Array, ""]:
    """How far σ(βΔ) is at most from 1 − ε, the share of labels that are right."""
    shares = jax.nn.sigmoid(BETA * margins(models, data))
    return jnp.abs(shares - (1 - WRONG)).max()


def last_loss(models: Any, metrics: Metrics, data: Any) -> Float[Array, ""]:
    """A loss that may come as near 0 as one likes."""
    return metrics["loss"].value


def _paired(
    factory: str,
    build: Callable[..., Algorithm],
    *,
    measure: Measure = last_loss,
    quantity: str = "loss",
    lora: tuple[bool, ...] = (False,),
    data: Callable[[int], Callable[[int], Any]] = paired,
    models: Callable[[Decoder], Any] = with_reference,
    **options: Any,
) -> Probe:
    return Probe(
        factory,
        build,
        models,
        data,
        measure,
        quantity,
        samples=False,
        lora=lora,
        options=options,
    )


NOISY: dict[str, Any] = {"loss": partial(preference.conservative, epsilon=WRONG), "beta": BETA}
MANY: dict[str, Any] = {
    "couple": preference.sorted_reference,
    "weigh": preference.wpo_weights,
    "beyond": 0.5,
    "nll": 0.1,
    "epochs": 2,
}

PROBES: dict[str, Probe] = {
    "dpo": _paired(
        "dpo",
        algorithms.dpo,
        measure=off_share,
        quantity="how far σ(βΔ) is from the labels' share",
        lora=(False, True),
        **NOISY,
    ),
    "dpo, ipo": _paired("dpo", algorithms.dpo, beta=1.0, loss=preference.ipo),
    "dpo with all terms": _paired("dpo", algorithms.dpo, beta=1.0, **MANY),
    "orpo": _paired("orpo", algorithms.orpo),
    "simpo": _paired("simpo", algorithms.simpo, gamma=0.5),
    "cpo": _paired("cpo", algorithms.cpo, beta=0.5),
    "kto": _paired("kto", algorithms.kto, data=judged, beta=1.0),
    "reward_model": _paired(
        "reward_model",
        algorithms.reward_model,
        models=partial(reward_model, jr.key(2)),
        centring=0.01,
    ),
    "process_reward_model": _paired(
        "process_reward_model",
        algorithms.process_reward_model,
        data=solved,
        models=value_model,
    ),
}
