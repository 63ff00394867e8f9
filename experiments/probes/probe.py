"""What a factory is tried on: a tiny model, and a task whose optimum is known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax.random as jr
import optax
from jaxtyping import Array, Float

from purepost import Algorithm
from purepost.mean import Metrics
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.weights import add_lora

CONFIG = Config(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    tie_embeddings=False,
)
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "dropout": 0.1}

# (models, metrics of the last step, its data) → a number
Measure = Callable[[Any, Metrics, Any], Float[Array, "..."]]


def tiny(*, lora: bool, seed: int = 0) -> Decoder:
    """A decoder whose frozen head is wide enough for adapters alone to make it certain."""
    model = init_decoder(jr.key(seed), CONFIG)
    model = eqx.tree_at(lambda m: m.head, model, replace_fn=lambda head: 2 * head)
    return add_lora(model, **LORA, key=jr.key(seed + 1)) if lora else model


@dataclass(frozen=True)
class Probe:
    """A factory, set up for a task whose optimum is known."""

    factory: str
    build: Callable[..., Algorithm]  # (optimizer, **options)
    models: Callable[[Decoder], Any]  # what the algorithm trains, around a decoder
    data: Callable[[int], Callable[[int], Any]]  # seed → step → data
    measure: Measure
    quantity: str  # what it measures, and in which unit
    optimum: float = 0.0
    samples: bool = True  # whether the rollout draws anything from its key
    lora: tuple[bool, ...] = (False, True)  # with adapters, without
    options: dict[str, Any] = field(default_factory=dict)
    still: Callable[[Any], Any] = lambda frozen: frozen  # what of the frozen models never moves

    def algorithm(self, optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
        """The factory called."""
        return self.build(optimizer, **(self.options | options))

    def gap(self, models: Any, metrics: Metrics, data: Any) -> float:
        """How far from the optimum the models are."""
        return abs(float(self.measure(models, metrics, data)) - self.optimum)
