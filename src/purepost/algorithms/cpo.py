"""Contrastive Preference Optimization: DPO without its reference, and the chosen completion's NLL
beside it.

L = −log σ(β(log π(y_c) − log π(y_r))) + α NLL(y_c)

Source: Xu et al., Contrastive Preference Optimization, 2401.08417. Differs from the
paper: the NLL is the mean over tokens.
"""

from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..rollout.labelled import Pairs
from .dpo import Models, Options, PairBatch, dpo


def cpo(
    optimizer: optax.GradientTransformation, **options: Unpack[Options]
) -> Algorithm[Models, Pairs, PairBatch]:
    """CPO with α = `nll` (1). Options are dpo's; any of its losses is a variant."""
    parts: Options = {"reference": False, "nll": 1.0}
    return dpo(optimizer, **(parts | options))
