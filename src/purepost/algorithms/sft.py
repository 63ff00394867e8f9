"""Supervised fine-tuning.

L = −Σ_t m_t log π(x_t | x_<t) / Σ_t m_t        over all trained tokens of an optimizer step

Source: Ouyang et al., InstructGPT, 2203.02155, §3.5. Differs from the paper: the mean is over the
trained tokens of the whole step, whatever its micro-batches; which tokens are trained is the
rows' mask (by default the assistant's).
"""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..mean import Metrics, Spans, Terms, masked_mean
from ..rollout.score import score
from ..types import KeyArray, LanguageModel, Rows
from ..weights import default_trainable


def sft(
    optimizer: optax.GradientTransformation,
    *,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[LanguageModel], PyTree] = default_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[LanguageModel, Rows, Rows]:
    """Supervised fine-tuning on rows: packed, whole sequences, or completions only, as their
    masks say.
    """

    def rollout(
        key: KeyArray, state: TrainState[LanguageModel], data: Rows
    ) -> tuple[Rows, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: LanguageModel, batch: Rows) -> tuple[Terms, Metrics]:
        scores = score(models, batch, key=key)
        shape = (batch.tokens.shape[0], batch.episodes)
        lengths = Spans(batch.mask, batch.episode, jnp.ones(shape)).lengths
        spans = Spans(batch.mask, batch.episode, (lengths > 0).astype(jnp.float32))
        metrics = {"entropy": masked_mean(scores.entropies, batch.mask)}
        return {"nll": aggregate(-scores.logps, spans)}, metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches),
    )
