"""Group Sequence Policy Optimization: ratios and clipping of whole sequences.

s_i = (π(y_i) / π_old(y_i))^(1/T_i)
L   = −Σ_i min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i) / B

Source: Zheng et al., GSPO, 2507.18071, eq. 5. Differs from the paper: none.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive
from ..losses import gspo as objective
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def gspo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    low: Scalar = 3e-4,
    high: Scalar = 4e-4,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO by sequences. Options are grpo's."""
    check_positive(low=low, high=high)
    parts: Options = {"objective": partial(objective, low=low, high=high)}
    return grpo(optimizer, collect, **(parts | options))
