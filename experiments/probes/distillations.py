"""Probes of distillation: a student, and a teacher whose distribution or features it can have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float

from purepost import Algorithm, algorithms
from purepost.algorithms.feature_projection import Projected, with_projections
from purepost.algorithms.gkd import Demonstrations
from purepost.algorithms.self_distillation import Views
from purepost.combine import Part, combine, over
from purepost.losses.distillation import forward_kl
from purepost.mean import Metrics, masked_mean
from purepost.models.containers import Distill, WithReference
from purepost.models.decoder import Decoder, init_decoder
from purepost.rollout.divergence import compare
from purepost.rollout.sample import Prompts
from purepost.types import Rows, causal_rows

from .probe import Measure, Probe
from .sampled import COLLECT, DRAWN, GROUP, tasks
from .supervised import LEAST, forked, nll

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


def forked_views(seed: int) -> Callable[[int], Views]:
    """The two forked sequences, read alike by student and teacher."""
    of = forked(seed)
    return lambda step: Views(of(step))


def prompts(seed: int) -> Callable[[int], Prompts]:
    """Only the prompts of the tasks."""
    of = tasks(seed)
    return lambda step: of(step).prompts


def demonstrations(seed: int) -> Callable[[int], Demonstrations]:
    """The prompts of the tasks, each with one to three random tokens behind it."""
    of = tasks(seed)

    def data(step: int) -> Demonstrations:
        tokens = np.random.default_rng((seed, step)).integers(3, 12, (4, 3))
        lengths = jnp.asarray([3, 2, 3, 1], jnp.int32)
        return Demonstrations(of(step).prompts, jnp.asarray(tokens, jnp.int32), lengths)

    return data


def tasks_and_rows(seed: int) -> Callable[[int], Any]:
    """Four prompts, and eight rows."""
    two = tasks(seed), rows(seed)
    return lambda step: tuple(of(step) for of in two)


def divergence(models: Distill[Decoder], metrics: Metrics, data: Any) -> Float[Array, ""]:
    """KL(teacher‖student) of tokens 6 and 7 in any order."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(6, 8, (8, 4)), jnp.int32)
    known = causal_rows(tokens, jnp.full(8, 4, jnp.int32))
    found = compare(models.student, models.teacher, known, forward_kl)
    return masked_mean(found.divergences, known.mask).value


def of_metrics(name: str) -> Measure:
    """A metric of the last step."""

    def measure(models: Any, metrics: Metrics, data: Any) -> Float[Array, ""]:
        return metrics[name].value

    return measure


def student_nll(models: Distill[Decoder], metrics: Metrics, data: Views) -> Float[Array, ""]:
    """The student's loss."""
    return nll(models.student, metrics, data.rows)


def rewarded_and_taught(optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
    """GRPO of a student, with a little of its distillation."""
    rl = algorithms.grpo(optimizer, COLLECT, **options)
    far = algorithms.logit_distillation(optimizer, alpha=1.0)
    return combine(Part("rl", over(learner, rl)), Part("far", far, weight=0.05))


def _distilled(
    factory: str, build: Callable[..., Algorithm], data: Callable[[int], Callable[[int], Any]]
) -> Probe:
    quantity = "KL(teacher‖student), nats per token"
    return Probe(factory, build, with_teacher, data, divergence, quantity, lora=(False,))


def _alike(
    factory: str, build: Callable[..., Algorithm], models: Callable[[Decoder], Any], metric: str
) -> Probe:
    return Probe(
        factory,
        build,
        models,
        rows,
        of_metrics(metric),
        f"distance of {metric}",
        samples=False,
        lora=(False,),
        options={"alpha": 0.9},
    )


PROBES: dict[str, Probe] = {
    "logit_distillation": replace(
        _distilled("logit_distillation", algorithms.logit_distillation, rows),
        samples=False,
        options={"alpha": 1.0},
    ),
    "gkd": _distilled(
        "gkd",
        lambda optimizer, **options: algorithms.gkd(optimizer, DRAWN, **options),
        demonstrations,
    ),
    "sequence_distillation": _distilled(
        "sequence_distillation",
        lambda optimizer, **options: algorithms.sequence_distillation(
            optimizer, DRAWN, group=GROUP, **options
        ),
        prompts,
    ),
    "on_policy_distillation": _distilled(
        "on_policy_distillation",
        lambda optimizer, **options: algorithms.on_policy_distillation(
            optimizer, COLLECT, **options
        ),
        tasks,
    ),
    "attention_transfer": _alike(
        "attention_transfer", algorithms.attention_transfer, with_even_attention, "attention"
    ),
    "feature_pooling": _alike(
        "feature_pooling", algorithms.feature_pooling, with_larger, "features"
    ),
    "feature_projection": _alike(
        "feature_projection", algorithms.feature_projection, projected, "features"
    ),
    "self_distillation": Probe(
        "self_distillation",
        algorithms.self_distillation,
        lambda model: Distill(model, model),
        forked_views,
        student_nll,
        "NLL, nats per token",
        LEAST,
        samples=False,
        lora=(True,),
        options={"decay": 0.5},
        still=lambda frozen: frozen.student,
    ),
    "combine: grpo and logit_distillation": Probe(
        "grpo",
        rewarded_and_taught,
        with_teacher,
        tasks_and_rows,
        of_metrics("rl/reward"),
        "reward",
        1.0,
        lora=(False,),
    ),
}
