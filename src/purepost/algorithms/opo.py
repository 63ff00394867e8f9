"""On-policy RL with the Optimal reward baseline.

A_i = r_i − Σ_j T_j r_j / Σ_j T_j        over the completions of one prompt
L   = −Σ_i A_i Σ_t log π(y_it) / B

Source: Hao et al., On-policy RL with optimal reward baseline, 2505.23585. Differs from the paper:
none; it asks for one optimizer step per rollout, the default.
"""

from typing import Unpack

import optax

from ..advantages import length_weighted
from ..algorithm import Algorithm
from ..losses import reinforce, sequence_sum
from ..rollout.collect import Collect, Tasks
from .grpo import Models, Options, PolicyBatch, grpo


def opo(
    optimizer: optax.GradientTransformation, collect: Collect, **options: Unpack[Options]
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """REINFORCE with the baseline of least variance. Options are grpo's."""
    parts: Options = {
        "advantage": length_weighted,
        "objective": reinforce,
        "aggregate": sequence_sum,
    }
    return grpo(optimizer, collect, **(parts | options))
