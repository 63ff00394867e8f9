"""Self-distillation: a teacher that is the moving average of its student.

L = Σ_t m_t [α T² D(teacher_T, student_T) + (1 − α)(−log π(x_t | x_<t))] / Σ_t m_t
θ_teacher ← d θ_teacher + (1 − d) θ_student        after every step

The teacher may read what the student does not, such as a demonstration or a hint in front of the
prompt. With `own_completions` and α = 1 the student learns from completions of its own.

Source: Tarvainen & Valpola, Mean teachers are better role models, 1703.01780, §2; with a hint and
own completions Shenfeld et al., Self-distillation enables continual learning (SDFT), 2601.19897.
Differs from them:
1. D is the forward KL unless another divergence is given; the first takes the squared error,
   SDFT `reverse_kl`.
2. Only the student's dropout is noise.
3. Adapters are averaged factor by factor.
"""

from collections.abc import Callable
from typing import TypeVar, Unpack

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..algorithm import Algorithm, RolloutFn, Steps, TrainState, make_init, make_update
from ..follow import follow
from ..losses import Aggregate, token_mean
from ..losses.distillation import Divergence, forward_kl
from ..losses.limits import expect
from ..mean import Metrics, Terms, mean_of, spans_of, weighted
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..rollout.divergence import compare
from ..rollout.draw import Sampling
from ..rollout.sample import Prompts, generate
from ..types import KeyArray, Rows, Scalar, group_rows

Models = Distill[Decoder]
Data = TypeVar("Data")


class Views(eqx.Module):
    """Rows as the student reads them, and as the teacher does: as many trained tokens in each row,
    in the same order. None: what the student reads.
    """

    rows: Rows
    teacher_rows: Rows | None = None


class Hinted(eqx.Module):
    """Prompts, and the same prompts with what the teacher is told beside."""

    prompts: Prompts
    teacher_prompts: Prompts


def given(key: KeyArray, state: TrainState[Models], data: Views) -> tuple[Views, Metrics]:
    """The views as they are."""
    return data, {}


def own_completions(sampling: Sampling, *, group: int = 1) -> RolloutFn[Models, Hinted, Views]:
    """A rollout: `group` completions of each prompt that the student samples; the teacher reads
    them behind its own prompts. Error: group < 1.
    """
    if group < 1:
        raise ValueError(f"expected group ≥ 1, got {group}")

    @eqx.filter_jit
    def rollout(key: KeyArray, state: TrainState[Models], data: Hinted) -> tuple[Views, Metrics]:
        c = generate(key, state.models.student, data.prompts, sampling, group=group)
        views = [
            group_rows(p.tokens, p.lengths, c.tokens, c.lengths, c.mask, ids=data.prompts.ids)
            for p in (data.prompts, data.teacher_prompts)
        ]
        return Views(*views), {"completions/mean_length": mean_of(c.lengths.astype(jnp.float32))}

    return rollout


def self_distillation(
    optimizer: optax.GradientTransformation,
    *,
    decay: float = 0.999,
    rollout: RolloutFn[Models, Data, Views] = given,
    divergence: Divergence = forward_kl,
    temperature: Scalar = 1.0,
    alpha: Scalar = 0.5,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Models], PyTree] = student_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Models, Data, Views]:
    """The student towards the average of its past, and with weight 1 − `alpha` towards the rows'
    tokens; it begins as Distill(model, model). `decay` is d.

    Errors: numbers out of range; at the first step, models of two structures.
    """
    expect("decay", decay, 0.0, 1.0, or_low=True)
    expect("temperature", temperature, 0.0)
    expect("alpha", alpha, 0.0, 1.0, or_low=True, or_high=True)

    def loss(key: KeyArray, models: Models, batch: Views) -> tuple[Terms, Metrics]:
        rows = batch.rows
        found = compare(
            models.student,
            models.teacher,
            rows,
            divergence,
            temperature=temperature,
            teacher_rows=batch.teacher_rows,
            key=key,
        )
        spans = spans_of(rows)
        metrics = {
            "divergence": aggregate(found.divergences, spans),
            "nll": aggregate(-found.logps, spans),
        }
        return weighted(metrics, divergence=alpha * temperature**2, nll=1 - alpha), metrics

    moved = follow(lambda m: m.student, lambda m: m.teacher, share=1 - decay)
    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, after=moved, **steps),
    )
