"""REINFORCE Leave-One-Out.

A_i = r_i − mean of the group's other rewards
L   = −Σ_i A_i Σ_t log π(y_it) / B

Source: Ahmadian et al., Back to Basics, 2402.14740, eq. 8. Differs from the paper: a KL penalty,
if wanted, is a term of the loss (`beta`), not part of the reward. With several optimizer steps
per rollout pass `objective=clipped`, as TRL does.
"""

from typing import Unpack

import optax

from ..advantages import leave_one_out
from ..algorithm import Algorithm
from ..losses import reinforce, sequence_sum
from ..rollout.collect import Collect, Tasks
from .grpo import Models, Options, PolicyBatch, grpo


def rloo(
    optimizer: optax.GradientTransformation, collect: Collect, **options: Unpack[Options]
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """REINFORCE with the other completions as the baseline. Options are grpo's."""
    parts: Options = {
        "advantage": leave_one_out,
        "objective": reinforce,
        "aggregate": sequence_sum,
    }
    return grpo(optimizer, collect, **(parts | options))
