"""REINFORCE++: the batch, not the prompt's group, is what a return is compared with.

G_it = r_i − β Σ_{s ≥ t} (log π_old(y_is) − log π_ref(y_is))
A_it = (G_it − mean(G)) / std(G)        over all trained tokens of the batch
L    = −Σ_i Σ_t min(ρ_it A_it, clip(ρ_it, 1−ε, 1+ε) A_it) / Σ_i T_i

Source: Hu et al., REINFORCE++, 2501.03262. Differs from the paper: π_old in the penalty is the
sampler's. Its second form, REINFORCE++-baseline, is `reinforce_pp(..., advantage=group_whitened,
refine=None, kl=k2, beta=...)`: r_i − mean(r) of the group, whitened, and the KL in the loss.
"""

from functools import partial
from typing import Unpack

import optax

from ..advantages import penalized, uncompared
from ..algorithm import Algorithm
from ..losses import check_positive, token_mean
from ..rollout.collect import Collect, Tasks
from ..types import Scalar
from .grpo import Models, Options, PolicyBatch, grpo


def reinforce_pp(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    penalty: Scalar = 0.0,
    gamma: Scalar = 1.0,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """Whitened returns, with `penalty`·KL in the reward (nats). Options are grpo's."""
    check_positive(gamma=gamma)
    refine = partial(penalized, penalty=penalty, gamma=gamma)
    parts: Options = {"advantage": uncompared, "refine": refine, "aggregate": token_mean}
    return grpo(optimizer, collect, **(parts | options))
