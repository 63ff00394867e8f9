"""A process reward model: is each step of a solution right?

L = −Σ_k [z_k log σ(x_k) + (1 − z_k) log σ(−x_k)] / K        over the K steps of an optimizer step

x_k is read at the last token of step k; z_k is 1 where the step is right.

Source: Uesato et al., 2211.14275, §2.3, and Lightman et al., Let's Verify Step by Step, 2305.20050,
§2.6. Differs from the papers: one logit from a head of its own, not two tokens of the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..mean import Metrics, Terms, masked_mean, select
from ..models.heads import ValueHead, adapters_and_head
from ..rollout.labelled import Steps
from ..types import KeyArray


def process_reward_model(
    optimizer: optax.GradientTransformation,
    *,
    trainable: Callable[[ValueHead], PyTree] = adapters_and_head,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[ValueHead, Steps, Steps]:
    """A head on a decoder (`models.heads.value_model`) learns which steps are right, as log-odds;
    `rewards.models.process_reward` makes it a reward.
    """

    def rollout(key: KeyArray, state: TrainState[ValueHead], data: Steps) -> tuple[Steps, Metrics]:
        return data, {}

    def loss(key: KeyArray, models: ValueHead, batch: Steps) -> tuple[Terms, Metrics]:
        mask = batch.rows.mask
        logits = select(mask, models.after(batch.rows))
        losses = -jax.nn.log_sigmoid(jnp.where(batch.right, logits, -logits))
        found = ((logits > 0) == batch.right).astype(jnp.float32)
        metrics = {
            "accuracy": masked_mean(found, mask),
            "right": masked_mean(batch.right.astype(jnp.float32), mask),
        }
        return {"steps": masked_mean(losses, mask)}, metrics

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches),
    )
