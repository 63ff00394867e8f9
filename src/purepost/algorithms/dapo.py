"""Decoupled clip and dynamic sampling policy optimization.

A_i = (r_i − mean(r)) / (std(r) + ε)        over the completions of one prompt
L   = −Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε_low, 1+ε_high) A_i) / Σ_i T_i

over groups whose rewards differ, with more prompts drawn for those that do not.

Source: Yu et al., DAPO, 2503.14476, eq. 8. Differs from the paper:
1. A step's data is a pool of `draws`·p prompts; after `draws` draws of p prompts the step makes do
   with the mixed groups that it has. Nothing is carried over to the next step.
2. The overlong penalty is a reward's wrapper, `purepost.rewards.overlong`; to leave out truncated
   completions instead, pass `filters=[finished]`.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive, clipped, token_mean
from ..rollout.collect import Collect, Tasks
from ..rollout.dynamic import dynamic
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def dapo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    draws: int = 1,
    low: Scalar = 0.2,
    high: Scalar = 0.28,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO with clip-higher, a mean over tokens and dynamic sampling. Options are grpo's."""
    check_positive(low=low, high=high)
    parts: Options = {
        "objective": partial(clipped, low=low, high=high),
        "aggregate": token_mean,
    }
    return grpo(optimizer, dynamic(collect, draws), **(parts | options))
