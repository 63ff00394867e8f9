"""Group reward-Decoupled normalization Policy Optimization: several rewards, each on its own scale.

A_ik = (r_ik − mean(r_k)) / (std(r_k) + ε)        over the completions of one prompt
A_i  = Σ_k w_k A_ik, whitened over the batch
L    = GRPO's

Source: Liu et al., GDPO, 2601.05242. Differs from the paper: a completion that a reward says
nothing about (NaN) leaves that reward's statistics.
"""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import optax

from ..advantages import decoupled
from ..algorithm import Algorithm
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def gdpo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    weights: Sequence[Scalar] | None = None,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO for a reward that returns [p, g, k], weighed by `weights` (1 each). Options are
    grpo's.
    """
    parts: Options = {"advantage": partial(decoupled, weights=weights)}
    return grpo(optimizer, collect, **(parts | options))
