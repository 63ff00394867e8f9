"""Maximum Likelihood Reinforcement Learning: towards log P(success), not P(success).

A_i = (r_i − mean(r)) / mean(r)        over the completions of one prompt, 0 if none succeeds
L   = −Σ_i A_i Σ_t log π(y_it) / B

Source: Tajwar et al., Maximum likelihood RL, 2602.02710. Differs from the paper: none; rewards are
meant to be 0 or 1.
"""

from typing import Unpack

import optax

from ..advantages import mean_normalized
from ..algorithm import Algorithm
from ..losses import reinforce, sequence_sum
from ..rollout.collect import Collect, Tasks
from .grpo import Models, Options, PolicyBatch, grpo


def max_rl(
    optimizer: optax.GradientTransformation, collect: Collect, **options: Unpack[Options]
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """REINFORCE that weighs a prompt by 1/its success rate. Options are grpo's."""
    parts: Options = {
        "advantage": mean_normalized,
        "objective": reinforce,
        "aggregate": sequence_sum,
    }
    return grpo(optimizer, collect, **(parts | options))
