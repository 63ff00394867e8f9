"""What every algorithm of the package is tried on: the contract's tests hold each factory to these
probes, and experiments/shelf.py shows how it learns them.

A new factory needs an entry in one of the PROBES below.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from purepost.models.containers import WithReference, with_reference
from purepost.models.decoder import Decoder
from purepost.weights import int8, quantize

from . import distillations, preferences, sampled, supervised
from .known import KNOWN as KNOWN
from .probe import LORA as LORA
from .probe import Probe as Probe
from .probe import tiny as tiny
from .sampled import policy as policy

PROBES: dict[str, Probe] = (
    supervised.PROBES | sampled.PROBES | preferences.PROBES | distillations.PROBES
)


def _held(model: Decoder, **options: Any) -> WithReference[Decoder]:
    return with_reference(quantize(model, **options))


# The same on frozen weights of four bits, or of eight: no algorithm knows.
PROBES |= {
    "sft on NF4": replace(PROBES["sft"], models=partial(quantize, block=8), lora=(True,)),
    "grpo on NF4": replace(PROBES["grpo"], models=partial(_held, block=8), lora=(True,)),
    "dpo on int8": replace(PROBES["dpo"], models=partial(_held, kind=int8), lora=(True,)),
}
