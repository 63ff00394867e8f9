"""The algorithms: one paper, one file, each a factory that returns an `Algorithm`."""

if __name__ != "purepost.algorithms":
    raise ImportError(
        f"expected the name purepost.algorithms, got {__name__!r}: the link at the root "
        "is there for readers, and importing it would make a second copy of every class; "
        "write `import purepost.algorithms`"
    )

from .cpo import cpo as cpo
from .dft import dft as dft
from .dpo import dpo as dpo
from .dr_grpo import dr_grpo as dr_grpo
from .grpo import grpo as grpo
from .kto import kto as kto
from .orpo import orpo as orpo
from .rloo import rloo as rloo
from .sft import sft as sft
from .simpo import simpo as simpo
