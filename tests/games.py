"""A game of two turns whose optimum is known: what the contract asks of episodes of several turns,
with a critic and without.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from experiments.probes import Probe
from experiments.probes.sampled import END, GOAL, GROUP, UNSCORED, policy, with_critic
from purepost import algorithms
from purepost.filters import ended_by
from purepost.rollout.draw import Sampling
from purepost.rollout.environment import MAX_TURNS, Environment, Tokens
from purepost.rollout.multi_turn import multi_turn
from purepost.turns import turn_gae, turn_normalized
from purepost.types import KeyArray

ANSWER, TURNS = 3, 2


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


GAME = multi_turn(
    Environment(reset, step),
    Sampling(max_tokens=2, stop_ids=(END,)),
    group=GROUP,
    max_turns=TURNS,
    max_tokens=2 * TURNS + 1,
)
BY_TURNS: dict[str, Any] = {
    "advantage": turn_normalized(gamma=0.9),
    "filters": (ended_by(MAX_TURNS),),
}
PROBES: dict[str, Probe] = {
    "grpo, two turns": policy("grpo", algorithms.grpo, lora=(True,), collect=(GAME,), **BY_TURNS),
    "ppo, two turns": with_critic(
        "ppo", algorithms.ppo, collect=(GAME,), estimate=turn_gae, gamma=0.9
    ),
}
