"""Attention transfer: the student's attention maps towards the teacher's.

L = Σ_t m_t [α (D(A_teacher, A_student) + c D(V_teacher, V_student)) − (1 − α) log π(x_t)] / Σ_t m_t

D is the mean over pairs of layers and over heads; A is the attention of the query from which token
t is predicted, V that of values to values, softmax(v vᵀ/√k).

Source: Zagoruyko & Komodakis, Paying more attention to attention, 1612.03928, §3.1; of a
transformer's maps Wang et al., MiniLM, 2002.10957, §3.1, and V §3.2. Differs from them:
1. D is MiniLM's KL(teacher‖student); the first paper's squared distance of maps made unit vectors
   is twice `of_probabilities(cosine_distance)`, of each query's map by itself.
2. Only queries from which a trained token is predicted are compared.
3. Where the numbers of heads differ, `heads` means of neighbouring heads are compared.
"""

from collections.abc import Callable
from typing import Unpack

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..losses.distillation import Divergence, forward_kl
from ..losses.limits import expect
from ..mean import Metrics, Terms, spans_of, weighted
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..models.trace import LayerPairs, expect_one_vocabulary, expect_pairs, trace
from ..rollout.maps import compare_maps
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar

Models = Distill[Decoder]


def attention_transfer(
    optimizer: optax.GradientTransformation,
    *,
    layers: LayerPairs = ((-1, -1),),
    divergence: Divergence = forward_kl,
    heads: int | None = None,
    values: Scalar = 0.0,
    alpha: Scalar = 0.75,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Models], PyTree] = student_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Models, Rows, Rows]:
    """The student's maps towards the teacher's in pairs of `layers` (the student's, the teacher's),
    and with weight 1 − `alpha` towards the rows' tokens. `values` is c: 1 in MiniLM.

    Errors: no layers, numbers out of range; at the first step, a layer that there is not, another
    vocabulary, numbers of heads that do not fit.
    """
    expect_pairs(layers)
    expect("heads", 1 if heads is None else heads, 1.0, or_low=True)
    expect("values", values, 0.0, or_low=True)
    expect("alpha", alpha, 0.0, 1.0, or_low=True, or_high=True)
    related = eqx.is_array(values) or bool(values != 0)

    def rollout(key: KeyArray, state: TrainState[Models], data: Rows) -> tuple[Rows, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: Models, batch: Rows) -> tuple[Terms, Metrics]:
        expect_one_vocabulary(models.student, models.teacher)
        own = trace(models.student, batch, heads=[s for s, _ in layers], key=key)
        other = trace(models.teacher, batch, heads=[t for _, t in layers])
        pairs = list(zip(own.heads, other.heads, strict=True))
        spans = spans_of(batch)
        nll = -score(own, batch).logps
        maps = [compare_maps(s, t, batch, divergence, groups=heads) for s, t in pairs]
        far = jnp.stack(maps).mean(0)
        metrics = {"attention": aggregate(far, spans), "nll": aggregate(nll, spans)}
        terms = weighted(metrics, attention=alpha, nll=1 - alpha)
        if related:
            pairs = [(s.relations, t.relations) for s, t in pairs]
            maps = [compare_maps(s, t, batch, divergence, groups=heads) for s, t in pairs]
            metrics["values"] = aggregate(jnp.stack(maps).mean(0), spans)
            terms["values"] = metrics["values"].times(alpha * values)
        return terms, metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, **steps),
    )
