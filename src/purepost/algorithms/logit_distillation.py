"""Distillation of a teacher's distribution into a student.

L = Σ_t m_t [α T² D(teacher_T, student_T) + (1 − α)(−log π(x_t | x_<t))] / Σ_t m_t

Both distributions are at temperature T; T² keeps the size of the gradient whatever T is.

Source: Hinton et al., Distilling the knowledge in a neural network, 1503.02531, §2. Differs from
the paper:
1. D is the forward KL unless another divergence is given; the gradient is that of the paper's cross
   entropy.
2. The mean is over the trained tokens of the whole optimizer step.
"""

from collections.abc import Callable

import optax
from jaxtyping import PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..losses.distillation import Divergence, forward_kl
from ..losses.limits import expect
from ..mean import Metrics, Terms, spans_of
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..rollout.divergence import compare
from ..types import KeyArray, Rows, Scalar

Models = Distill[Decoder]


def logit_distillation(
    optimizer: optax.GradientTransformation,
    *,
    divergence: Divergence = forward_kl,
    temperature: Scalar = 2.0,
    alpha: Scalar = 0.5,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Models], PyTree] = student_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[Models, Rows, Rows]:
    """The student towards the teacher on rows, and with weight 1 − `alpha` towards their tokens.

    Errors: a temperature that is not positive, alpha outside [0, 1]; at the first step, a teacher
    of another vocabulary.
    """
    expect("temperature", temperature, 0.0)
    expect("alpha", alpha, 0.0, 1.0, or_low=True, or_high=True)

    def rollout(key: KeyArray, state: TrainState[Models], data: Rows) -> tuple[Rows, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: Models, batch: Rows) -> tuple[Terms, Metrics]:
        found = compare(
            models.student, models.teacher, batch, divergence, temperature=temperature, key=key
        )
        spans = spans_of(batch)
        far = aggregate(found.divergences, spans)
        nll = aggregate(-found.logps, spans)
        scaled = alpha * temperature**2
        terms = {
            "divergence": far.times(scaled),
            "nll": nll.times(1 - alpha),
        }
        teacher_nll = aggregate(-found.teacher_logps, spans)
        return terms, {"divergence": far, "nll": nll, "teacher_nll": teacher_nll}

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches),
    )
