"""The values and gradients of TRL's own loss functions. `make peers` runs it in .venv-trl.

    .venv-trl/bin/python tests/golden/peers/make_trl.py TARGET.npz

A trainer is made without its constructor, with the settings that its loss reads; the model is one
that has its logits at hand, through TRL's own fused head. Generation and rewards are given; all
else is TRL's.
"""

import sys
from typing import Any

import numpy as np
from trl_pairs import PAIRED
from trl_policy import POLICY

if __name__ == "__main__":
    made: dict[str, Any] = {}
    for name, case in (POLICY | PAIRED).items():
        value, gradient = case()
        made[f"{name}/value"] = np.asarray(value, np.float32)
        made[f"{name}/gradient"] = np.asarray(gradient, np.float32)
    np.savez_compressed(sys.argv[1], **made)
