"""Sequence-level distillation: supervised fine-tuning on what the teacher samples.

L = −Σ_t m_t log π_student(y_t | x, y_<t) / Σ_t m_t,  y ~ π_teacher(· | x)

Source: Kim & Rush, Sequence-level knowledge distillation, 1606.07947, §3.2. Differs from the paper:
the teacher samples (at temperature 0: decodes greedily) where the paper searches with a beam.
"""

from collections.abc import Callable
from typing import Unpack

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..mean import Metrics, Terms, masked_mean, mean_of, spans_of
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..rollout.draw import Sampling
from ..rollout.sample import Prompts, generate
from ..rollout.score import score
from ..types import KeyArray, Rows, group_rows

Models = Distill[Decoder]


def sequence_distillation(
    optimizer: optax.GradientTransformation,
    sampling: Sampling,
    *,
    group: int = 1,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Models], PyTree] = student_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Models, Prompts, Rows]:
    """The student on `group` completions of every prompt, sampled by the teacher.

    `steps`: epochs, minibatches, microbatches, as of make_update. Error: group < 1.
    """
    if group < 1:
        raise ValueError(f"expected group ≥ 1, got {group}")

    @eqx.filter_jit
    def rollout(key: KeyArray, state: TrainState[Models], data: Prompts) -> tuple[Rows, Metrics]:
        c = generate(key, state.models.teacher, data, sampling, group=group)
        rows = group_rows(data.tokens, data.lengths, c.tokens, c.lengths, c.mask, ids=data.ids)
        return rows, {"completions/mean_length": mean_of(c.lengths.astype(jnp.float32))}

    def loss(key: KeyArray, models: Models, batch: Rows) -> tuple[Terms, Metrics]:
        scores = score(models.student, batch, key=key)
        spans = spans_of(batch)
        metrics = {"entropy": masked_mean(scores.entropies, batch.mask)}
        return {"nll": aggregate(-scores.logps, spans)}, metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, **steps),
    )
