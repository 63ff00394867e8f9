"""Odds Ratio Preference Optimization: supervised fine-tuning that also pushes the rejected
completion away, without a reference.

odds(y) = p/(1 − p), log p = the mean of log π over y's tokens
L = NLL(y_c) − λ log σ(log odds(y_c) − log odds(y_r))

Source: Hong et al., 2403.07691, eq. 6 and 7. Differs from the paper: the NLL is the mean over the
chosen completions' tokens of a whole optimizer step, whatever its micro-batches.
"""

from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses.preference import odds_ratio
from ..rollout.labelled import Pairs
from .dpo import Models, Options, PairBatch, dpo


def orpo(
    optimizer: optax.GradientTransformation, **options: Unpack[Options]
) -> Algorithm[Models, Pairs, PairBatch]:
    """ORPO with λ = `beta` (0.1). Options are dpo's."""
    parts: Options = {"loss": odds_ratio, "nll": 1.0, "reference": False}
    return dpo(optimizer, **(parts | options))
