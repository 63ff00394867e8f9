"""Optimizer state in the host's memory between steps, where the device has no room for it.

    state = offload(algorithm.init(key, models))

Where a leaf lies is part of its type, so that is all there is to say: an optimizer step brings to
the device what lies elsewhere once the gradient is there, when activations no longer take room, and
leaves its successor where it lay. The numbers are those of the run without, to the bit.

Source: Ren et al., ZeRO-Offload, 2101.06840, §4. Differs from the paper: the device, not the host,
computes the step.
"""

from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

State = TypeVar("State", bound=eqx.Module)
T = TypeVar("T")

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


def offload(state: State) -> State:
    """The train state with the moments and masters of its optimizer in pinned memory of the host.

    Numbers without axes stay on the device. To be given to `train` as the state of `init` is; a
    checkpoint is restored to where the state that it is given lies.
    """
    move = lambda x: jax.device_put(x, _HOST) if eqx.is_array(x) and x.ndim else x  # noqa: E731
    return eqx.tree_at(lambda s: s.opt_state, state, replace_fn=lambda o: jax.tree.map(move, o))


def fetch(tree: T, after: Array) -> T:
    """The tree on the device: what lies in the host's memory comes when `after` is computed."""
    leaves, structure = jax.tree.flatten(tree)
    away = [i for i, x in enumerate(leaves) if _is_away(x)]
    if away:
        _, held = jax.lax.optimization_barrier((after, [leaves[i] for i in away]))
        for i, x in zip(away, held, strict=True):
            leaves[i] = jax.device_put(x, _DEVICE)
    return jax.tree.unflatten(structure, leaves)


def put_back(tree: T, places: PyTree) -> T:
    """The tree with its leaves in the memories that those of `places` lie in."""
    return jax.tree.map(
        lambda x, place: jax.device_put(x, _HOST) if _is_away(place) else x, tree, places
    )


def _is_away(x: Any) -> bool:
    return eqx.is_array(x) and jax.typeof(x).memory_space == _HOST
