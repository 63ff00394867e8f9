"""Value-Augmented PPO: PPO for long chains of thought.

λ of the returns is 1, λ of the advantages 1 − 1/max(α T_i, 1): the longer, the less biased
L = PPO's with clip-higher and means over tokens + μ Σ −log π(y_t) / Σ T over episodes that succeed

Source: Yue et al., VAPO, 2504.05118, §4. Differs from the paper: the critic is not pretrained; an
episode succeeds if its reward is positive.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from ..algorithm import Algorithm
from ..losses import check_positive, clipped
from ..models.critic import ActorCritic
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .ppo import ActorCriticBatch, ppo


def vapo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    alpha: Scalar = 0.05,
    low: Scalar = 0.2,
    high: Scalar = 0.28,
    positive_nll: Scalar = 0.1,
    **options: Any,
) -> Algorithm[ActorCritic, Tasks, ActorCriticBatch]:
    """PPO with `alpha` in λ and `positive_nll` for μ. Options are ppo's."""
    check_positive(alpha=alpha, low=low, high=high)
    parts: dict[str, Any] = {
        "objective": partial(clipped, low=low, high=high),
        "decay": lambda lengths: 1 - 1 / jnp.maximum(alpha * lengths, 1.0),
        "value_decay": jnp.ones_like,
        "positive_nll": positive_nll,
    }
    return ppo(optimizer, collect, **(parts | options))
