"""Variational Sequence-level Soft Policy Optimization: a smooth kernel of the sequence's weight.

w_i  = π(y_i) / π_old(y_i)
φ(w) = w^k exp(λ(1 − w)),     (k, λ) one pair where A_i ≥ 0, another where A_i < 0
L    = −Σ_i Σ_t sg(φ(w_i)) A_i log π(y_it) / Σ_i T_i

Source: Shen et al., VESPO, 2602.10693, eq. 20. Differs from the paper: log-ratios within ±20 nats
and w ≥ 1e-8, as in TRL.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses import check_positive, token_mean
from ..losses import vespo as objective
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def vespo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    positive: tuple[Scalar, Scalar] = (2.0, 3.0),
    negative: tuple[Scalar, Scalar] = (3.0, 2.0),
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO with a kernel of (k, λ) for good and for bad sequences. Options are grpo's."""
    check_positive(k=positive[0], rate=positive[1])
    check_positive(k=negative[0], rate=negative[1])
    parts: Options = {
        "objective": partial(objective, positive=positive, negative=negative),
        "aggregate": token_mean,
    }
    return grpo(optimizer, collect, **(parts | options))
