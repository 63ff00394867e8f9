"""Contrastive Preference Optimization: DPO without its reference, and the chosen completion's NLL
beside it.

L = −log σ(β(log π(y_c) − log π(y_r))) + α NLL(y_c)

Source: Xu et al., Contrastive Preference Optimization, 2401.08417. Differs from the
paper: the NLL is the mean over tokens.
"""

from typing import Any

import optax

from ..algorithm import Algorithm
from ..rollout.labelled import Pairs
from ..types import Scalar
from .dpo import Models, PairBatch, dpo


def cpo(
    optimizer: optax.GradientTransformation,
    *,
    beta: Scalar = 0.1,
    nll: Scalar = 1.0,
    **options: Any,
) -> Algorithm[Models, Pairs, PairBatch]:
    """CPO with α = `nll`. Options are dpo's; any of its losses is a variant."""
    parts: dict[str, Any] = {"reference": False}
    return dpo(optimizer, beta=beta, nll=nll, **(parts | options))
