"""Pass@k training: reward the best of a group's k completions for what it adds.

A_i = r_(1) − r_(2) for the one best completion of a prompt, 0 for the others
L   = GRPO's

Source: Tang et al., Optimizing language models for inference time objectives, 2503.19595. Differs
from the paper: k is the size of the group, and the loss is clipped as GRPO's.
"""

from typing import Unpack

import optax

from ..advantages import best_of_group
from ..algorithm import Algorithm
from ..rollout.collect import Collect, Tasks
from .grpo import Models, Options, PolicyBatch, grpo


def pass_at_k(
    optimizer: optax.GradientTransformation, collect: Collect, **options: Unpack[Options]
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO on the best of each group. Options are grpo's."""
    parts: Options = {"advantage": best_of_group}
    return grpo(optimizer, collect, **(parts | options))
