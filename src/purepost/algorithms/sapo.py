"""Soft Adaptive Policy Optimization: a smooth gate in place of the clip.

ρ_it = π(y_it) / π_old(y_it),     τ = τ_pos where A_i > 0, else τ_neg
L    = −Σ_i 1/T_i Σ_t A_i · σ(τ(ρ_it − 1)) · 4/τ / B

Source: Gao et al., Soft Adaptive Policy Optimization, 2511.20347, eq. 5. Differs from the paper:
none.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive
from ..losses import sapo as objective
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def sapo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    positive: Scalar = 1.0,
    negative: Scalar = 1.05,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO with a gate of temperatures `positive` and `negative`. Options are grpo's."""
    check_positive(positive=positive, negative=negative)
    parts: Options = {"objective": partial(objective, positive=positive, negative=negative)}
    return grpo(optimizer, collect, **(parts | options))
