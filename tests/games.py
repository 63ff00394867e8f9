"""A game of two turns whose optimum is known, and what the contract asks of algorithms that play
it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float
from tests.probe import Probe

from purepost import Algorithm, algorithms
from purepost.filters import ended_by
from purepost.mean import Metrics
from purepost.models.containers import with_reference
from purepost.models.critic import ActorCritic, actor_critic
from purepost.models.decoder import Decoder
from purepost.rollout.collect import Collect, Tasks
from purepost.rollout.draw import Sampling
from purepost.rollout.environment import MAX_TURNS, Environment, Tokens
from purepost.rollout.multi_turn import multi_turn
from purepost.turns import turn_gae, turn_normalized
from purepost.types import KeyArray

GOAL, END, UNSCORED, ANSWER, TURNS = 6, 1, 2, 3, 2


def reset(key: KeyArray, task: dict[str, Any]) -> tuple[None, Tokens]:
    """Nothing is said at first."""
    return None, Tokens(jnp.zeros(1, jnp.int32), jnp.zeros((), jnp.int32))


def step(
    key: KeyArray, state: None, action: Tokens
) -> tuple[None, Tokens, Float[Array, ""], Bool[Array, ""]]:
    """½ for a turn that begins with GOAL or a later token; UNSCORED breaks the game."""
    first = action.ids[0]
    reward = jnp.where(first >= GOAL, 1 / TURNS, 0.0)
    reward = jnp.where(first == UNSCORED, jnp.nan, reward)
    answer = Tokens(jnp.full(1, ANSWER, jnp.int32), jnp.ones((), jnp.int32))
    return None, answer, reward, jnp.bool_(False)


def game(*, group: int) -> Collect:
    """Two turns of up to two tokens: at best 1."""
    drawn = Sampling(max_tokens=2, stop_ids=(END,))
    return multi_turn(
        Environment(reset, step), drawn, group=group, max_turns=TURNS, max_tokens=2 * TURNS + 1
    )


def reward_gap(models: Any, metrics: Metrics, data: Tasks) -> float:
    """How far the last step's reward is from 1."""
    return 1.0 - float(metrics["reward"].value)


def probes(tasks: Callable[[int], Callable[[int], Tasks]]) -> dict[str, Probe]:
    """With credit by turns, with a critic and without."""
    collect = game(group=4)

    def playing(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        def built(optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
            return build(optimizer, collect, **options)

        return built

    def critic(model: Decoder) -> ActorCritic:
        return actor_critic(with_reference(model))

    by_turns = {"advantage": turn_normalized(gamma=0.9), "filters": (ended_by(MAX_TURNS),)}
    return {
        "grpo, two turns": Probe(
            "grpo",
            playing(algorithms.grpo),
            with_reference,
            tasks,
            reward_gap,
            lora=(True,),
            options=by_turns,
        ),
        "ppo, two turns": Probe(
            "ppo",
            playing(algorithms.ppo),
            critic,
            tasks,
            reward_gap,
            lora=(False,),
            options={"estimate": turn_gae, "gamma": 0.9},
        ),
    }
