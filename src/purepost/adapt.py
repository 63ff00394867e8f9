"""Coefficients that an algorithm carries from step to step, and adapts."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from .algorithm import TrainState
from .follow import After
from .mean import Metrics
from .types import KeyArray, Scalar


def adaptive_kl(target: Scalar, *, rate: Scalar = 0.1) -> After:
    """An `after` by which the coefficient in `state.extra` goes up where the metric "kl" is above
    its target (nats), down where it is below: β ← β (1 + rate·clip(KL/target − 1, −.2, .2)).

    A step without a KL leaves it. Source: Ziegler et al., 1909.08593, §2.2. Error: target ≤ 0.
    """
    if isinstance(target, float | int) and not target > 0:
        raise ValueError(f"expected a target > 0 nats, got {target}")

    def after(key: KeyArray, state: TrainState[Any], metrics: Metrics) -> TrainState[Any]:
        if "kl" not in metrics:
            return state
        kl = metrics["kl"]
        error = jnp.where(kl.weight > 0, jnp.clip(kl.value / target - 1, -0.2, 0.2), 0.0)
        return dataclasses.replace(state, extra=state.extra * (1 + rate * error))

    return after
