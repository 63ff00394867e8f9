"""Simple Preference Optimization: DPO of length-averaged log-probabilities, with a margin to reach
and no reference.

L = −log σ(β(mean log π(y_c) − mean log π(y_r)) − γ)

Source: Meng et al., SimPO, 2405.14734, eq. 6.
"""

from functools import partial
from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses.limits import expect
from ..losses.preference import simpo as simpo_loss
from ..rollout.labelled import Pairs
from ..types import Scalar
from .dpo import Models, Options, PairBatch, dpo


def simpo(
    optimizer: optax.GradientTransformation,
    *,
    gamma: Scalar = 1.0,
    **options: Unpack[Options],
) -> Algorithm[Models, Pairs, PairBatch]:
    """SimPO with the margin `gamma`, in units of the scaled reward. Options are dpo's, β is 2;
    with `nll` it is CPO-SimPO.
    """
    expect("gamma", gamma, 0.0, or_low=True)
    parts: Options = {
        "loss": partial(simpo_loss, gamma=gamma),
        "beta": 2.0,
        "reference": False,
    }
    return dpo(optimizer, **(parts | options))
