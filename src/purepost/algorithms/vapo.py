"""Value-Augmented PPO: PPO for long chains of thought.

λ of the returns is 1, λ of the advantages 1 − 1/max(α T_i, 1): the longer, the less biased
L = PPO's with clip-higher and means over tokens + μ Σ −log π(y_t) / Σ T over episodes that succeed

Source: Yue et al., VAPO, 2504.05118, §4. Differs from the paper: the critic is not pretrained; an
episode succeeds if its reward is positive.
"""

from functools import partial
from typing import Unpack

import jax.numpy as jnp
import optax

from ..algorithm import Algorithm
from ..losses import check_positive, clipped
from ..models.critic import ActorCritic
from ..policy_batch import ActorCriticBatch
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .ppo import Options, ppo


def vapo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    alpha: Scalar = 0.05,
    low: Scalar = 0.2,
    high: Scalar = 0.28,
    **options: Unpack[Options],
) -> Algorithm[ActorCritic, Tasks, ActorCriticBatch]:
    """PPO with `alpha` in λ. Options are ppo's, μ among them as `positive_nll`."""
    check_positive(alpha=alpha, low=low, high=high)
    parts: Options = {
        "objective": partial(clipped, low=low, high=high),
        "decay": lambda lengths: 1 - 1 / jnp.maximum(alpha * lengths, 1.0),
        "value_decay": jnp.ones_like,
        "positive_nll": 0.1,
    }
    return ppo(optimizer, collect, **(parts | options))
