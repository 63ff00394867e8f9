"""Environments on the host as coroutines over token ids."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..types import KeyArray
from .environment import Environment, Tokens

Ids = list[int]


@dataclass(frozen=True)
class Anew:
    """An observation with which the text begins anew: these ids are the whole next prompt."""

    ids: Sequence[int]


Seen = Sequence[int] | Anew  # what goes on with the text, or begins it anew


class Late(Exception):
    """What an environment raises that keeps time-outs of its own: the episode ends with TIMEOUT."""


def let_be(state: Any) -> None:
    """Nothing is to be let go."""


@dataclass(frozen=True)
class AsyncEnvironment:
    """An environment on the host: two coroutines, over token ids.

    `reset(key, task) → (state, observation)`, with one entry of each of the task's columns;
    `step(key, state, action) → (state, observation, reward, done)`. What they raise ends the
    episode, not the run. `close(state)`, once for each `reset` that gave one, when the episode is
    over.
    """

    reset: Callable[[KeyArray, dict[str, Any]], Awaitable[tuple[Any, Seen]]]
    step: Callable[[KeyArray, Any, Ids], Awaitable[tuple[Any, Seen, float, bool]]]
    close: Callable[[Any], None] = let_be


def hosted(env: Environment, *, width: int) -> AsyncEnvironment:
    """An environment written in JAX, on the host; `width`: tokens of its longest turn."""
    reset_, step_ = eqx.filter_jit(env.reset), eqx.filter_jit(env.step)

    def ids_of(text: Tokens) -> Ids:
        return np.asarray(text.ids)[: int(text.length)].tolist()

    async def reset(key: KeyArray, task: dict[str, Any]) -> tuple[Any, Ids]:
        state, seen = reset_(key, task)
        return state, ids_of(seen)

    async def step(key: KeyArray, state: Any, action: Ids) -> tuple[Any, Ids, float, bool]:
        ids = jnp.asarray(action + [0] * (width - len(action)), jnp.int32)
        said = Tokens(ids, jnp.asarray(len(action), jnp.int32))
        state, seen, reward, done = step_(key, state, said)
        return state, ids_of(seen), float(reward), bool(done)

    return AsyncEnvironment(reset, step)
