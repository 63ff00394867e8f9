"""Divergence PPO: a trust region of probabilities in place of one of ratios.

ρ_it = π(y_it) / π_old(y_it)
L    = −Σ_i Σ_t keep_it · sg(min(ρ_it, cap)) A_i log π(y_it) / Σ_i T_i
keep_it: π(y_it) has not moved where A_i pushes by more than δ, in total variation (`dppo_tv`) or
in the KL between “this token or another” (`dppo_kl`).

Source: Qi et al., Rethinking the trust region in LLM RL, 2602.04879. Differs from the paper: π_old
is the trainer's; add `correction` for a sampler that differs from it.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import optax
from jaxtyping import Array, Float

from ..algorithm import Algorithm
from ..losses import check_positive, dppo_tv, token_mean
from ..mean import Metrics
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def dppo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    divergence: Callable[..., tuple[Float[Array, "b t"], Metrics]] = dppo_tv,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    cap: Scalar = 3.0,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO within a `divergence`, `dppo_tv` or `dppo_kl`. Options are grpo's."""
    check_positive(low=low, high=high, cap=cap)
    parts: Options = {
        "objective": partial(divergence, low=low, high=high, cap=cap),
        "aggregate": token_mean,
    }
    return grpo(optimizer, collect, **(parts | options))
