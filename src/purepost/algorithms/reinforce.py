"""REINFORCE, without a baseline.

A_i = r_i
L   = −Σ_i A_i Σ_t log π(y_it) / B

Source: Williams, Simple statistical gradient-following algorithms, 1992; for language models
Ahmadian et al., Back to Basics, 2402.14740, §2. Differs from the papers: a KL penalty, if wanted,
is a term of the loss (`beta`), not part of the reward.
"""

from typing import Unpack

import optax

from ..advantages import uncompared
from ..algorithm import Algorithm
from ..losses import reinforce as objective
from ..losses import sequence_sum
from ..rollout.collect import Collect, Tasks
from .grpo import Models, Options, PolicyBatch, grpo


def reinforce(
    optimizer: optax.GradientTransformation, collect: Collect, **options: Unpack[Options]
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """The plain policy gradient. Options are grpo's."""
    parts: Options = {
        "advantage": uncompared,
        "objective": objective,
        "aggregate": sequence_sum,
    }
    return grpo(optimizer, collect, **(parts | options))
