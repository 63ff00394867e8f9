"""A student and a teacher whose distribution is known, for the contract's probes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from purepost import Algorithm, algorithms
from purepost.algorithms.feature_projection import Projected, with_projections
from purepost.algorithms.gkd import Demonstrations
from purepost.algorithms.self_distillation import Views
from purepost.losses.distillation import forward_kl
from purepost.mean import Metrics
from purepost.models.containers import Distill, WithReference
from purepost.models.decoder import Decoder, init_decoder
from purepost.rollout.collect import Tasks
from purepost.rollout.divergence import compare
from purepost.rollout.sample import Prompts
from purepost.types import Rows, causal_rows
from tests.probe import Probe

FAVOURITES = {6: 4.0, 7: 3.0}  # token → logit; all others 0, whatever stands before


def with_teacher(student: Decoder) -> Distill[Decoder]:
    """The student beside a teacher that says the same after every token."""
    vocab, width = student.config.vocab_size, student.config.hidden_size
    silent = jax.tree.map(jnp.zeros_like, student.layers)
    head = jnp.zeros((width, vocab))
    for token, logit in FAVOURITES.items():
        head = head.at[:, token].set(logit / width)
    base = eqx.tree_at(
        lambda m: (m.layers, m.embed, m.head), student, (silent, jnp.ones((vocab, width)), head)
    )
    return Distill(student, base)


def rows(seed: int) -> Callable[[int], Rows]:
    """Eight sequences of up to five random tokens every step."""

    def data(step: int) -> Rows:
        rng = np.random.default_rng((seed, step))
        lengths = jnp.asarray(rng.integers(2, 6, 8), jnp.int32)
        tokens = jnp.asarray(rng.integers(3, 12, (8, 5)), jnp.int32)
        return causal_rows(tokens, lengths, ids=jnp.arange(8 * step, 8 * step + 8, dtype=jnp.int32))

    return data


def views(seed: int) -> Callable[[int], Views]:
    """The same, read alike by student and teacher."""
    of = rows(seed)
    return lambda step: Views(of(step))


def prompts_of(tasks: Callable[[int], Callable[[int], Tasks]]) -> Callable[[int], Any]:
    """Only the prompts of the tasks."""

    def data(seed: int) -> Callable[[int], Prompts]:
        of = tasks(seed)
        return lambda step: of(step).prompts

    return data


def demonstrations(tasks: Callable[[int], Callable[[int], Tasks]]) -> Callable[[int], Any]:
    """The prompts of the tasks, each with one to three random tokens behind it."""

    def data(seed: int) -> Callable[[int], Demonstrations]:
        of = tasks(seed)

        def at(step: int) -> Demonstrations:
            tokens = np.random.default_rng((seed, step)).integers(3, 12, (4, 3))
            lengths = jnp.asarray([3, 2, 3, 1], jnp.int32)
            return Demonstrations(of(step).prompts, jnp.asarray(tokens, jnp.int32), lengths)

        return at

    return data


def divergence_gap(models: Distill[Decoder], metrics: Metrics, data: Any) -> float:
    """KL(teacher‖student) in nats per token, of tokens 6 and 7 in any order."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(6, 8, (8, 4)), jnp.int32)
    known = causal_rows(tokens, jnp.full(8, 4, jnp.int32))
    found = compare(models.student, models.teacher, known, forward_kl)
    return float(found.divergences.sum() / known.mask.sum(dtype=jnp.float32))


def learner(models: Distill[Decoder]) -> WithReference[Decoder]:
    """The student as a policy without a reference."""
    return WithReference(models.student)


def with_even_attention(student: Decoder) -> Distill[Decoder]:
    """A student whose attention is sharp, beside a teacher who attends to all that it sees."""

    def times(factor: float) -> Decoder:
        return eqx.tree_at(lambda m: m.layers.attention.q, student, replace_fn=lambda q: factor * q)

    return Distill(times(3.0), times(0.0))


def with_larger(student: Decoder) -> Distill[Decoder]:
    """The student beside a teacher of another depth and width, whose states are all alike."""
    larger = init_decoder(jr.key(7), replace(student.config, num_layers=3, hidden_size=24))
    same = jnp.ones_like(larger.embed), jax.tree.map(jnp.zeros_like, larger.layers)
    return Distill(student, eqx.tree_at(lambda m: (m.embed, m.layers), larger, same))


def projected(student: Decoder) -> Projected:
    """The same, with projections."""
    return with_projections(jr.key(8), with_larger(student))


def _alike(
    factory: str, build: Callable[..., Algorithm], models: Callable[[Decoder], Any], metric: str
) -> Probe:
    def gap(models: Any, metrics: Metrics, data: Any) -> float:
        return float(metrics[metric].value)

    probe = Probe(factory, build, models, rows, gap, samples=False, lora=(False,))
    return replace(probe, options={"alpha": 1.0})


PROBES: dict[str, Probe] = {
    "attention_transfer": _alike(
        "attention_transfer", algorithms.attention_transfer, with_even_attention, "attention"
    ),
    "feature_pooling": _alike(
        "feature_pooling", algorithms.feature_pooling, with_larger, "features"
    ),
    "feature_projection": _alike(
        "feature_projection", algorithms.feature_projection, projected, "features"
    ),
}
