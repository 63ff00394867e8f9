"""Supervised fine-tuning.

L = −Σ_t m_t log π(x_t | x_<t) / Σ_t m_t        over all trained tokens of an optimizer step

Source: Ouyang et al., InstructGPT, 2203.02155, §3.5. Differs from the paper: the mean is over the
trained tokens of the whole step, whatever its micro-batches; which tokens are trained is the
rows' mask (by default the assistant's).
"""

from collections.abc import Callable

import equinox as eqx
import optax
from jaxtyping import Array, Float, PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..losses.limits import expect
from ..losses.supervised import label_smoothed, squared_normalizer
from ..mean import Metrics, Terms, masked_mean, spans_of
from ..rollout.score import score
from ..types import KeyArray, LanguageModel, Rows, Scalar
from ..weights import default_trainable


class Options(Steps, total=False):
    """The keyword arguments of `sft`, as its variants hand them on."""

    aggregate: Aggregate
    weigh: Callable[[Float[Array, "b t"]], Float[Array, "b t"]] | None
    label_smoothing: Scalar
    z_loss: Scalar
    trainable: Callable[[LanguageModel], PyTree]


def sft(
    optimizer: optax.GradientTransformation,
    *,
    aggregate: Aggregate = token_mean,
    weigh: Callable[[Float[Array, "b t"]], Float[Array, "b t"]] | None = None,
    label_smoothing: Scalar = 0.0,
    z_loss: Scalar = 0.0,
    trainable: Callable[[LanguageModel], PyTree] = default_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[LanguageModel, Rows, Rows]:
    """Supervised fine-tuning on rows: packed, whole sequences, or completions only, as their
    masks say. `weigh` gives tokens weights by their log-probabilities; `label_smoothing` is the
    share of any token's being meant; `z_loss` weighs (log Z)².
    """
    expect("label_smoothing", label_smoothing, 0.0, 1.0, or_low=True)
    expect("z_loss", z_loss, 0.0, or_low=True)
    smooth, drift = (eqx.is_array(c) or bool(c != 0) for c in (label_smoothing, z_loss))

    def rollout(
        key: KeyArray, state: TrainState[LanguageModel], data: Rows
    ) -> tuple[Rows, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: LanguageModel, batch: Rows) -> tuple[Terms, Metrics]:
        scores = score(models, batch, key=key, whole=smooth or drift)
        spans = spans_of(batch)
        metrics = {"entropy": masked_mean(scores.entropies, batch.mask)}
        losses = -scores.logps
        if smooth and scores.mean_logps is not None:
            losses = label_smoothed(scores.logps, scores.mean_logps, epsilon=label_smoothing)
            metrics["nll"] = aggregate(-scores.logps, spans)
        if weigh is not None:
            losses = weigh(scores.logps) * losses
        terms = {"nll": aggregate(losses, spans)}
        if drift and scores.normalizers is not None:
            term = aggregate(squared_normalizer(scores.normalizers), spans)
            terms["z"] = term.times(z_loss)
        return terms, metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches),
    )
