"""GSPO with an advantage for each token.

s_it = sg(s_i) · π(y_it) / sg(π(y_it)),     s_i = (π(y_i) / π_old(y_i))^(1/T_i)
L    = −Σ_i 1/T_i Σ_t min(s_it A_it, clip(s_it, 1−ε_low, 1+ε_high) A_it) / B

Source: Zheng et al., GSPO, 2507.18071, §4.3. Differs from the paper: log s_it is at most 10, as in
verl. Where the advantages of a sequence are equal, the gradient is GSPO's.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive
from ..losses import gspo_token as objective
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def gspo_token(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    low: Scalar = 3e-4,
    high: Scalar = 4e-4,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GSPO whose advantages may differ by token (`refine`). Options are grpo's."""
    check_positive(low=low, high=high)
    parts: Options = {"objective": partial(objective, low=low, high=high)}
    return grpo(optimizer, collect, **(parts | options))
