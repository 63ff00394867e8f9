"""On-policy distillation: the student's own completions, judged token by token by the teacher.

A_it = −c (log π_student(y_it) − log π_teacher(y_it)),   y ~ π_student
L    = −Σ_it A_it log π_student(y_it) / Σ_i T_i

In expectation the gradient is that of the reverse KL(student‖teacher) of each next token.

Source: Gu et al., MiniLLM, 2306.08543, §2.2; token by token as Lu, On-policy distillation, Thinking
Machines Lab, 2025. Differs from them:
1. An advantage is the verdict on its own token alone, as Lu has it; MiniLLM adds up those to come.
2. With several optimizer steps per rollout pass `objective=clipped`.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Float, PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses import Aggregate, Objective, reinforce, token_mean
from ..losses.limits import expect
from ..mean import Metrics, Spans, Terms, masked_mean, select, spans_of
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..policy_batch import check_lay
from ..rollout.collect import Collect, Episodes, Lay, Places, Tasks, episode_metrics, to_rows
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar

Models = Distill[Decoder]


class JudgedBatch(eqx.Module):
    """The student's episodes in rows. Log-probabilities in nats."""

    rows: Rows
    advantages: Float[Array, "b t"]
    old_logps: Float[Array, "b t"]
    temperature: Float[Array, " b"]


@eqx.filter_jit
def judge(
    models: Models, episodes: Episodes, laid: tuple[Rows, Places], strength: Scalar
) -> tuple[JudgedBatch, Metrics]:
    """Episodes in rows, with the teacher's verdict on every token."""
    rows, places = laid
    temperature = places.per_row(episodes.temperature)
    own = score(models.student, rows, temperature=temperature).logps
    wanted = score(models.teacher, rows, temperature=temperature).logps
    gap = select(rows.mask, own) - select(rows.mask, wanted)
    batch = JudgedBatch(rows, -strength * gap, own, temperature)
    return batch, episode_metrics(episodes) | {"reverse_kl": masked_mean(gap, rows.mask)}


def on_policy_distillation(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    strength: Scalar = 1.0,
    objective: Objective = reinforce,
    aggregate: Aggregate = token_mean,
    lay: Lay = to_rows,
    trainable: Callable[[Models], PyTree] = student_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[Models, Tasks, JudgedBatch]:
    """The student on its own episodes of `collect`, whose rewards are logged and nothing else.

    `strength` is c; `lay` lays episodes into rows, as in GRPO. Error: strength ≤ 0.
    """
    expect("strength", strength, 0.0)
    check_lay(aggregate, lay)

    def rollout(
        key: KeyArray, state: TrainState[Models], data: Tasks
    ) -> tuple[JudgedBatch, Metrics]:
        models = state.models
        episodes, metrics = collect(key, models.student, data)
        batch, more = judge(models, episodes, lay(episodes), strength)
        return batch, metrics | more

    def loss(key: KeyArray, models: Models, batch: JudgedBatch) -> tuple[Terms, Metrics]:
        scores = score(models.student, batch.rows, temperature=batch.temperature)
        spans: Spans = spans_of(batch.rows)
        old = jax.lax.stop_gradient(batch.old_logps)
        losses, metrics = objective(scores.logps, old, batch.advantages, spans)
        metrics["entropy"] = masked_mean(scores.entropies, batch.rows.mask)
        return {"policy": aggregate(losses, spans)}, metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches),
    )
