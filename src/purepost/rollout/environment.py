"""Environments that answer a policy's turns, as pure functions with explicit state and key.

One written in JAX is scanned, vmapped and fused with everything else. `purepost.environments` has
some, and runs those that are Python objects.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..mean import Metrics, mean_of
from ..models.decoder import Decoder
from ..types import KeyArray
from .collect import Episodes
from .sample import LENGTH, STOP, Completions, Prompts

# Why an episode of several turns ended, beside LENGTH (its tokens ran out) and STOP (the
# environment said that it is done).
MAX_TURNS, TIMEOUT, ERROR = 2, 3, 4
REASONS = {
    STOP: "done",
    MAX_TURNS: "max_turns",
    LENGTH: "max_context",
    TIMEOUT: "timeout",
    ERROR: "error",
}

State = TypeVar("State")
State_out = TypeVar("State_out", covariant=True)


class Tokens(eqx.Module):
    """A text of up to w tokens: what the policy says in a turn, or what it is answered. Or n such
    texts.
    """

    ids: Int[Array, "*n w"]
    length: Int[Array, "*n"]


@runtime_checkable
class ResetFn(Protocol[State_out]):
    """(key, task) → (state, observation)."""

    def __call__(self, key: KeyArray, task: Any) -> tuple[State_out, Tokens]:
        """Begin an episode of a task: one entry of each of `Tasks.columns`."""
        ...


@runtime_checkable
class StepFn(Protocol[State]):
    """(key, state, action) → (state, observation, reward, done)."""

    def __call__(
        self, key: KeyArray, state: State, action: Tokens
    ) -> tuple[State, Tokens, Float[Array, ""], Bool[Array, ""]]:
        """Answer a turn. A reward that is not finite says that the environment failed."""
        ...


@dataclass(frozen=True)
class Environment(Generic[State]):
    """Two pure functions. Observations have one width, in tokens, throughout an episode."""

    reset: ResetFn[State]
    step: StepFn[State]


@runtime_checkable
class Sample(Protocol):
    """(key, model, prompts) → completions: what collectors on the host draw a turn with.

    `functools.partial(generate, sampling=...)` is one; so is an engine that keeps caches.
    """

    def __call__(self, key: KeyArray, model: Decoder, prompts: Prompts) -> Completions:
        """One completion of every prompt, its random numbers belonging to the prompt's id."""
        ...


# (rewards, why the episodes ended) → rewards; NaN leaves an episode unscored
Outcome = Callable[[Float[Array, " n"], Int[Array, " n"]], Float[Array, " n"]]


def as_earned(rewards: Float[Array, " n"], finish: Int[Array, " n"]) -> Float[Array, " n"]:
    """The rewards, however the episode ended."""
    return rewards


def by_finish(worth: Mapping[int, float | int]) -> Outcome:
    """Episodes that ended for a reason named here are worth that number, whatever they earned.

    NaN leaves them unscored: out of their group's statistics and out of the loss. To leave them out
    of the loss alone, see `filters.ended_by`. Error: a reason that is none.
    """
    unknown = sorted(worth.keys() - REASONS.keys())
    if unknown:
        raise ValueError(f"expected reasons among {sorted(REASONS)}, got {unknown}")

    def outcome(rewards: Float[Array, " n"], finish: Int[Array, " n"]) -> Float[Array, " n"]:
        for reason, value in worth.items():
            rewards = jnp.where(finish == reason, jnp.float32(value), rewards)
        return rewards

    return outcome


def settle(episodes: Episodes, outcome: Outcome) -> Episodes:
    """The episodes with the rewards that `outcome` gives. Where these are others than were earned,
    they stand at the last sampled token.
    """
    rewards = outcome(episodes.rewards, episodes.finish)
    if episodes.step_rewards is None:
        return dataclasses.replace(episodes, rewards=rewards)
    n, t = episodes.mask.shape
    last = t - 1 - jnp.argmax(episodes.mask[:, ::-1], 1)
    whole = jnp.where(jnp.arange(t) == last[:, None], rewards[:, None], 0.0)
    changed = (rewards != episodes.rewards)[:, None] & jnp.isfinite(rewards)[:, None]
    steps = jnp.where(changed, whole, episodes.step_rewards)
    return dataclasses.replace(episodes, rewards=rewards, step_rewards=steps)


def finish_metrics(finish: Int[Array, " n"], turns: Int[Array, " n"]) -> Metrics:
    """Turns per episode, and the share of episodes that ended for each reason."""
    shares = {
        f"finish/{name}": mean_of((finish == reason).astype(jnp.float32))
        for reason, name in REASONS.items()
    }
    return {"turns": mean_of(turns.astype(jnp.float32))} | shares
