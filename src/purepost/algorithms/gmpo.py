"""Geometric-Mean Policy Optimization: the geometric mean of a sequence's clipped ratios.

l_it = log π(y_it) − log π_old(y_it), clipped to [−ε_low, ε_high] on the side that A_i pushes to
L    = −Σ_i A_i exp(Σ_t l_it / T_i) / B

Source: Zhao et al., Geometric-Mean Policy Optimization, 2507.20673. Differs from the paper: none.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive
from ..losses import gmpo as objective
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def gmpo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    low: Scalar = 0.4,
    high: Scalar = 0.4,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO by geometric means; the limits are of log-ratios, nats. Options are grpo's."""
    check_positive(low=low, high=high)
    parts: Options = {"objective": partial(objective, low=low, high=high)}
    return grpo(optimizer, collect, **(parts | options))
