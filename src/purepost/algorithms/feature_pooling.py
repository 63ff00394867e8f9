"""Feature pooling: the student's hidden states towards the teacher's, averaged to as many features.

L = Σ_t m_t [α D(pool(h_teacher), h_student) − (1 − α) log π(x_t | x_<t)] / Σ_t m_t

h is the stream after a layer, at the token from which t is predicted; D is 1 − cos, the mean over
pairs of layers. The wider of the two is pooled.

Source: Romero et al., FitNets, 1412.6550, §2.2. Differs from the paper: pooling in place of the
regressor; the angle, not the squared distance; all layers; one stage, with the tokens' loss.
"""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..losses.distillation import Distance, cosine_distance, pool_features
from ..losses.limits import expect
from ..mean import Metrics, Terms, spans_of, weighted
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..models.trace import LayerPairs, expect_one_vocabulary, expect_pairs, spread, trace
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar

Models = Distill[Decoder]


def pooled(
    distance: Distance, teacher: Float[Array, "b t i"], student: Float[Array, "b t o"]
) -> Float[Array, "b t"]:
    """The distance of the two, the wider pooled to the width of the other."""
    size = min(teacher.shape[-1], student.shape[-1])
    return distance(
        jax.lax.stop_gradient(pool_features(teacher, size)), pool_features(student, size)
    )


def feature_pooling(
    optimizer: optax.GradientTransformation,
    *,
    layers: LayerPairs | None = None,
    distance: Distance = cosine_distance,
    alpha: Scalar = 0.75,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Models], PyTree] = student_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Models, Rows, Rows]:
    """The student's states towards the teacher's in pairs of `layers` (the student's, the
    teacher's; by default every layer of the student, spread evenly over the teacher's), and with
    weight 1 − `alpha` towards the rows' tokens.

    Errors: no layers, alpha outside [0, 1]; at the first step, a layer that there is not, another
    vocabulary.
    """
    expect_pairs(layers)
    expect("alpha", alpha, 0.0, 1.0, or_low=True, or_high=True)

    def rollout(key: KeyArray, state: TrainState[Models], data: Rows) -> tuple[Rows, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: Models, batch: Rows) -> tuple[Terms, Metrics]:
        student, teacher = models.student, models.teacher
        expect_one_vocabulary(student, teacher)
        pairs = spread(student.config, teacher.config) if layers is None else layers
        own = trace(student, batch, states=[s for s, _ in pairs], key=key)
        other = trace(teacher, batch, states=[t for _, t in pairs])
        far = [pooled(distance, t, s) for s, t in zip(own.states, other.states, strict=True)]
        about = jnp.take_along_axis(jnp.stack(far).mean(0), batch.parent, 1)
        spans = spans_of(batch)
        nll = -score(own, batch).logps
        metrics = {"features": aggregate(about, spans), "nll": aggregate(nll, spans)}
        return weighted(metrics, features=alpha, nll=1 - alpha), metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, **steps),
    )
