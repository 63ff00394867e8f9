"""A reward model of preferences, by Bradley and Terry.

L = −log σ(r(y_c) − r(y_r) − m) + c (r(y_c) + r(y_r))²        mean over pairs

Source: Ouyang et al., InstructGPT, 2203.02155, eq. 1; the margin m, where the data have one, is
that of Touvron et al., Llama 2, 2307.09288, eq. 2; the centring c that of Eisenstein et al.,
Helping or Herding?, 2312.09244, eq. 2. Differs from the papers: a prompt has two completions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses.limits import expect
from ..losses.preference import weighted_mean
from ..mean import Mean, Metrics, Terms
from ..models.heads import SequenceClassifier, adapters_and_head
from ..rollout.labelled import Pairs
from ..types import KeyArray, Scalar


def reward_model(
    optimizer: optax.GradientTransformation,
    *,
    centring: Scalar = 0.0,
    trainable: Callable[[SequenceClassifier], PyTree] = adapters_and_head,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[SequenceClassifier, Pairs, Pairs]:
    """A classifier of one score learns to rank; `rewards.models.model_reward` makes it a reward.
    Error: a classifier of several scores.
    """
    expect("centring", centring, 0.0, or_low=True)

    def rollout(
        key: KeyArray, state: TrainState[SequenceClassifier], data: Pairs
    ) -> tuple[Pairs, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: SequenceClassifier, batch: Pairs) -> tuple[Terms, Metrics]:
        scores = models(batch.rows)
        if scores.shape[-1] != 1:
            raise ValueError(f"expected a classifier of 1 score, got {scores.shape[-1]}")
        chosen, rejected = scores[..., 0].T
        margin, counts = chosen - rejected, batch.real.astype(jnp.float32)

        def mean(x: Float[Array, " b"]) -> Mean:
            return weighted_mean(x, counts)

        centre = mean((chosen + rejected) ** 2)
        terms = {
            "preference": mean(-jax.nn.log_sigmoid(margin - batch.margins)),
            "centre": centre.times(centring),
        }
        return terms, {
            "accuracy": mean((margin > 0).astype(jnp.float32)),
            "margin": mean(margin),
            "mean_reward": mean((chosen + rejected) / 2),
        }

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches),
    )
