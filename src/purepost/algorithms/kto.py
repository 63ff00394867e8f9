"""Kahneman–Tversky Optimization: completions that are good or not, without pairs.

a = log π(y) − log π_ref(y)
z = max(0, mean over rows of log π(y')/π_ref(y'))       y' another row's completion, for this prompt
L = mean of λ_D(1 − σ(β(a − z))) over good completions, λ_U(1 − σ(β(z − a))) over the others

Source: Ethayarajh et al., KTO, 2402.01306, §4. Differs from the paper:
1. z is taken in the rollout, over all of its rows: micro-batches and minibatches share it. With one
   optimizer step per rollout it is the policy's own.
2. The other completion is that of the next row by id: the order of rows does not matter.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses.limits import expect
from ..losses.preference import kto as kto_loss
from ..losses.preference import weighted_mean
from ..mean import Metrics, Spans, Terms, masked_mean
from ..models.containers import WithReference, policy_trainable
from ..models.decoder import Decoder
from ..rollout.labelled import Judged, beside_the_next
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar

Models = WithReference[Decoder]
After = Callable[[KeyArray, TrainState[Models], Metrics], TrainState[Models]]


class JudgedBatch(eqx.Module):
    """A completion in each row. Log-probabilities in nats, summed over tokens."""

    rows: Rows
    good: Bool[Array, " b"]
    weights: Float[Array, " b"]  # 0: the row does not count
    ref_logps: Float[Array, " b"]
    z: Float[Array, " b"]  # the same for all


@eqx.filter_jit
def annotate(policy: Decoder, reference: Decoder, data: Judged) -> tuple[JudgedBatch, Metrics]:
    """The rows with the reference's log-probabilities and z."""
    rows, differs = beside_the_next(data.rows, data.real)
    spans = Spans(rows.mask, rows.episode, jnp.ones((rows.tokens.shape[0], 2)))
    other = eqx.tree_at(lambda r: r.mask, rows, rows.mask & (rows.episode == 1))
    ref = spans.sum(score(reference, rows).logps)
    kl = masked_mean(spans.sum(score(policy, other).logps)[:, 1] - ref[:, 1], differs)
    z = jnp.full(data.real.shape, jnp.maximum(kl.value, 0.0))
    weights = data.real.astype(jnp.float32)
    return JudgedBatch(data.rows, data.good, weights, ref[:, 0], z), {"kl": kl}


def kto(
    optimizer: optax.GradientTransformation,
    *,
    beta: Scalar = 0.1,
    desirable: Scalar = 1.0,
    undesirable: Scalar = 1.0,
    after: After | None = None,
    trainable: Callable[[Models], PyTree] = policy_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[Models, Judged, JudgedBatch]:
    """KTO; `desirable` and `undesirable` are λ_D and λ_U. Errors: a batch of one row, which has no
    other completion; a missing reference.
    """
    expect("beta", beta, 0.0)
    expect("desirable", desirable, 0.0, or_low=True)
    expect("undesirable", undesirable, 0.0, or_low=True)

    def rollout(
        key: KeyArray, state: TrainState[Models], data: Judged
    ) -> tuple[JudgedBatch, Metrics]:
        models = state.models
        if models.reference is None:
            raise ValueError("expected a reference, got none; pass with_reference(policy)")
        if data.good.shape[0] < 2:
            raise ValueError(
                "expected at least 2 rows, since z pairs a prompt with another's, got 1"
            )
        return annotate(models.policy, models.reference, data)

    def loss(key: KeyArray, models: Models, batch: JudgedBatch) -> tuple[Terms, Metrics]:
        scores = score(models.policy, batch.rows)
        spans = Spans(batch.rows.mask, batch.rows.episode, batch.weights[:, None])
        logps = spans.sum(scores.logps)[:, 0]
        ratios, good, counts = logps - batch.ref_logps, batch.good, batch.weights
        losses = kto_loss(
            ratios, good, batch.z, beta=beta, desirable=desirable, undesirable=undesirable
        )
        up, down = jnp.where(good, counts, 0.0), jnp.where(good, 0.0, counts)
        metrics = {
            "rewards/chosen": weighted_mean(beta * ratios, up),
            "rewards/rejected": weighted_mean(beta * ratios, down),
            "logps/chosen": weighted_mean(logps, up),
            "logps/rejected": weighted_mean(logps, down),
            "entropy": masked_mean(scores.entropies, batch.rows.mask),
        }
        return {"kto": weighted_mean(losses, counts)}, metrics

    update = make_update(
        optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches, after=after
    )
    return Algorithm(make_init(optimizer, trainable=trainable), rollout, loss, update)
