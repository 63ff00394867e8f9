"""Number guessing: find a hidden number by being told whether it is higher or lower."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ..rollout.environment import Environment, Tokens
from ..types import KeyArray


class Guessing(eqx.Module):
    """A game that is under way."""

    hidden: Int[Array, ""]


def guess(
    numbers: int,
    *,
    first_id: int,
    higher_id: int,
    lower_id: int,
    correct: float = 1.0,
    each: float = 0.0,
) -> Environment[Guessing]:
    """A hidden number of 0 … `numbers` − 1, each with the same probability; token `first_id` + i
    guesses i.

    The first token of a turn is the guess. It is answered by `higher_id`, or `lower_id`, which is
    also what a token that names no number gets; the right one ends the game. The reward is `each`
    a turn, and `correct` for the right number. Bisection needs ⌊log₂ numbers⌋ + 1 turns at most. A
    task may fix the number: {"number": ...}.
    """
    if numbers < 1:
        raise ValueError(f"expected numbers ≥ 1, got {numbers}")

    def reset(key: KeyArray, task: dict[str, Array]) -> tuple[Guessing, Tokens]:
        drawn = jr.randint(key, (), 0, numbers, jnp.int32)
        number = task["number"] if "number" in task else drawn
        return Guessing(number), Tokens(jnp.zeros(1, jnp.int32), jnp.zeros((), jnp.int32))

    def step(
        key: KeyArray, state: Guessing, action: Tokens
    ) -> tuple[Guessing, Tokens, Float[Array, ""], Bool[Array, ""]]:
        named = action.ids[0] - first_id
        done = named == state.hidden
        up = (named >= 0) & (named < state.hidden)
        answer = jnp.where(up, higher_id, lower_id).astype(jnp.int32)
        reward = each + jnp.where(done, correct, 0.0)
        return state, Tokens(answer[None], jnp.ones((), jnp.int32)), reward, done

    return Environment(reset, step)
