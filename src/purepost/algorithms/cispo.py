"""Clipped Importance Sampling Policy Optimization: weights are clipped, no token is lost.

ρ_it = π(y_it) / π_old(y_it)
L    = −Σ_i Σ_t sg(clip(ρ_it, low, high)) A_i log π(y_it) / Σ_i T_i

Source: MiniMax-M1, 2506.13585, eq. 4. Differs from the paper: the limits are of the ratio itself
(TRL's convention, high 5); the paper writes 1−ε_low and 1+ε_high.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive, token_mean
from ..losses import cispo as objective
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def cispo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    low: Scalar = 0.0,
    high: Scalar = 5.0,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """REINFORCE with clipped weights. Options are grpo's."""
    check_positive(high=high)
    parts: Options = {
        "objective": partial(objective, low=low, high=high),
        "aggregate": token_mean,
    }
    return grpo(optimizer, collect, **(parts | options))
