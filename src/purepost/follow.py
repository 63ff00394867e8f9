"""Frozen models that follow one that trains: a reference that is refreshed, a teacher that is an
average of its student's past.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .algorithm import TrainState
from .mean import Metrics
from .types import KeyArray

After = Callable[[KeyArray, TrainState[Any], Metrics], TrainState[Any]]


def follow(
    leader: Callable[[Any], PyTree],
    follower: Callable[[Any], PyTree],
    *,
    every: int = 1,
    share: float | int = 1.0,
) -> After:
    """An `after` that moves the follower every so many steps: φ ← share·θ + (1 − share)·φ.

    A reference: `follow(lambda m: m.policy, lambda m: m.reference, every=512)`, which is TR-DPO,
    Gorbatovski et al., Learn Your Reference Model, 2404.09656. Weights that do not train stay;
    adapters are mixed factor by factor. Errors: numbers out of range; another structure.
    """
    if every < 1 or not 0 < share <= 1:
        raise ValueError(f"expected every ≥ 1 and 0 < share ≤ 1, got {every} and {share}")

    def after(key: KeyArray, state: TrainState[Any], metrics: Metrics) -> TrainState[Any]:
        models = state.models
        if jax.tree.structure(leader(models)) != jax.tree.structure(follower(models)):
            raise ValueError(
                "expected models of one structure, one following the other, got different ones (a "
                "reference without the policy's adapters?); use a copy: "
                "WithReference(policy, policy)"
            )
        due = state.step % every == 0

        def move(new: Any, old: Any) -> Any:
            if new is None:
                return old
            mixed = share * new.astype(jnp.float32) + (1 - share) * old.astype(jnp.float32)
            return jnp.where(due, mixed.astype(old.dtype), old)

        moved = jax.tree.map(
            move, leader(state.params), follower(state.frozen), is_leaf=lambda x: x is None
        )
        return eqx.tree_at(lambda s: follower(s.frozen), state, moved)

    return after
