"""The algorithms: one paper, one file, each a factory that returns an `Algorithm`."""

if __name__ != "purepost.algorithms":
    raise ImportError(
        f"expected the name purepost.algorithms, got {__name__!r}: the link at the root "
        "is there for readers, and importing it would make a second copy of every class; "
        "write `import purepost.algorithms`"
    )

from .dr_grpo import dr_grpo as dr_grpo
from .grpo import grpo as grpo
from .rloo import rloo as rloo
from .sft import sft as sft
