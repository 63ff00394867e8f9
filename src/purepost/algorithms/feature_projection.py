"""Feature projection: the student's hidden states, each layer's through a linear map that trains
with it, towards the teacher's.

L = Σ_t m_t [α ‖h_teacher − W h_student‖² / d − (1 − α) log π(x_t | x_<t)] / Σ_t m_t

h is the stream after a layer, at the token from which t is predicted; the first term is the mean
over pairs of layers, each with a W of its own, and over the teacher's d features.

Source: Romero et al., FitNets, 1412.6550, eq. 3; in all layers at once Jiao et al., TinyBERT,
1909.10351, eq. 8. Differs from them: one stage, with the tokens' loss.
"""

from collections.abc import Callable
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..losses.distillation import Distance, squared_error
from ..losses.limits import expect
from ..mean import Metrics, Terms, spans_of, weighted
from ..models.containers import Distill
from ..models.decoder import Decoder
from ..models.trace import LayerPairs, expect_one_vocabulary, expect_pairs, layers_of, spread, trace
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar
from ..weights import default_trainable


class Projected(eqx.Module):
    """A student, its teacher, and the maps from the student's features to the teacher's."""

    student: Decoder
    teacher: Decoder
    projections: Float[Array, "n i o"]  # one for each pair of layers
    layers: LayerPairs = eqx.field(static=True)


def with_projections(
    key: KeyArray, models: Distill[Decoder], layers: LayerPairs | None = None
) -> Projected:
    """The two with a map for every pair of `layers` (the student's, the teacher's; by default every
    layer of the student, spread evenly over the teacher's): normal, of deviation 1/√i.

    Errors: no layers, a layer that there is not, another vocabulary.
    """
    student, teacher = models.student, models.teacher
    expect_one_vocabulary(student, teacher)
    expect_pairs(layers)
    pairs = spread(student.config, teacher.config) if layers is None else layers
    own, other = (
        layers_of(m.config, [pair[i] for pair in pairs]) for i, m in enumerate((student, teacher))
    )
    shape = len(pairs), student.config.hidden_size, teacher.config.hidden_size
    maps = jr.normal(key, shape, jnp.float32) * shape[1] ** -0.5
    return Projected(student, teacher, maps, tuple(zip(own, other, strict=True)))


def projected_trainable(models: Projected) -> PyTree:
    """The student's adapters, or all of its floats if it has none, and the maps; never the
    teacher.
    """
    return eqx.tree_at(
        lambda m: (m.student, m.projections),
        jax.tree.map(lambda _: False, models),
        (default_trainable(models.student), True),
    )


def feature_projection(
    optimizer: optax.GradientTransformation,
    *,
    distance: Distance = squared_error,
    alpha: Scalar = 0.75,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Projected], PyTree] = projected_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Projected, Rows, Rows]:
    """The student's states towards the teacher's, as the models' maps have them, and with weight
    1 − `alpha` towards the rows' tokens. Error: alpha outside [0, 1].
    """
    expect("alpha", alpha, 0.0, 1.0, or_low=True, or_high=True)

    def rollout(key: KeyArray, state: TrainState[Projected], data: Rows) -> tuple[Rows, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: Projected, batch: Rows) -> tuple[Terms, Metrics]:
        own = trace(models.student, batch, states=[s for s, _ in models.layers], key=key)
        other = trace(models.teacher, batch, states=[t for _, t in models.layers])
        far = [
            distance(jax.lax.stop_gradient(t), s.astype(jnp.float32) @ w)
            for s, t, w in zip(own.states, other.states, models.projections, strict=True)
        ]
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
