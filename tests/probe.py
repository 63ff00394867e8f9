"""What the contract is asked of: a factory, set up for a task whose optimum is known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optax

from purepost import Algorithm
from purepost.mean import Metrics
from purepost.models.decoder import Decoder


@dataclass(frozen=True)
class Probe:
    """A factory, set up for a task whose optimum is known."""

    factory: str
    build: Callable[..., Algorithm]  # (optimizer, **options)
    models: Callable[[Decoder], Any]  # what the algorithm trains, around a decoder
    data: Callable[[int], Callable[[int], Any]]  # seed → step → data
    gap: Callable[[Any, Metrics, Any], float]  # (models, last metrics, data) → from the optimum
    samples: bool = True  # whether the rollout draws anything from its key
    lora: tuple[bool, ...] = (False, True)  # with adapters, without
    options: dict[str, Any] = field(default_factory=dict)
    still: Callable[[Any], Any] = lambda frozen: frozen  # what of the frozen models never moves

    def algorithm(self, optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
        """The factory called."""
        return self.build(optimizer, **(self.options | options))
