"""Dynamic Fine-Tuning: supervised fine-tuning without its weight 1/π on tokens that the model
thinks improbable.

L = −Σ_t sg(π(x_t)) log π(x_t) / T        over the T trained tokens of an optimizer step

Source: Wu et al., On the Generalization of SFT, 2508.05629.
"""

from typing import Unpack

import optax

from ..algorithm import Algorithm
from ..losses.supervised import probability
from ..types import LanguageModel, Rows
from .sft import Options, sft


def dft(
    optimizer: optax.GradientTransformation, **options: Unpack[Options]
) -> Algorithm[LanguageModel, Rows, Rows]:
    """SFT whose tokens weigh as much as they are probable. Options are sft's."""
    parts: Options = {"weigh": probability}
    return sft(optimizer, **(parts | options))
