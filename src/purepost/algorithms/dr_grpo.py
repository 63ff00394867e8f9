"""GRPO done right: GRPO without its biases by length and by difficulty.

A_i = r_i − mean(r)
L   = −Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) / (B · L_max)

Source: Liu et al., Understanding R1-Zero-like training, 2503.20783, §3.2.
"""

from typing import Unpack

import optax

from ..advantages import group_centered
from ..algorithm import Algorithm
from ..losses import constant
from ..rollout.collect import Collect, Tasks
from .grpo import Models, Options, PolicyBatch, grpo


def dr_grpo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    max_tokens: int,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO with centred advantages and sums over L_max = `max_tokens`. Options are grpo's."""
    parts: Options = {"advantage": group_centered, "aggregate": constant(max_tokens)}
    return grpo(optimizer, collect, **(parts | options))
