"""Collectors that carry something from step to step: rollouts under way, a buffer.

What they carry is an argument and a result, plain data or a pytree; a `Collect`, which algorithms
take, is made of them by whoever keeps it: `in_memory`, or `checkpoint.journaled` for runs that are
to be resumed.
"""

from typing import Any, Protocol, TypeVar, runtime_checkable

from ..mean import Metrics
from ..models.decoder import Decoder
from ..types import KeyArray
from .collect import Collect, Episodes, Tasks

Carried = TypeVar("Carried")


@runtime_checkable
class StatefulCollect(Protocol[Carried]):
    """(key, model, tasks, carried) → (episodes, metrics, carried)."""

    def start(self) -> Carried:
        """What is carried into the first step."""
        ...

    def __call__(
        self, key: KeyArray, model: Decoder, tasks: Tasks, carried: Carried
    ) -> tuple[Episodes, Metrics, Carried]:
        """Roll out tasks; what was carried in stays as it is."""
        ...


class Stateless:
    """A `Collect` in the place of a collector that carries something."""

    def __init__(self, collect: Collect) -> None:
        self.collect = collect

    def start(self) -> None:
        """Nothing."""

    def __call__(
        self, key: KeyArray, model: Decoder, tasks: Tasks, carried: None
    ) -> tuple[Episodes, Metrics, None]:
        """Roll out every task."""
        return *self.collect(key, model, tasks), None


def in_memory(collect: StatefulCollect[Any]) -> Collect:
    """A collector that keeps what it carries until the process ends."""
    carried = collect.start()

    def collected(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        nonlocal carried
        episodes, metrics, carried = collect(key, model, tasks, carried)
        return episodes, metrics

    return collected
