"""A penalty for completions that come near the limit on tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..mean import Metrics, mean_of
from ..rollout.collect import Reward, Tasks
from ..rollout.sample import Completions


def overlong_penalty(lengths: Int[Array, "*s"], max_tokens: int, buffer: int) -> Float[Array, "*s"]:
    """0 up to `max_tokens` − `buffer` tokens, from there down to −1 at `max_tokens`, and −1 beyond.

    Source: Yu et al., DAPO, 2503.14476, eq. 13.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"expected 0 < buffer ≤ max_tokens, got {buffer} and {max_tokens}")
    over = (max_tokens - buffer - lengths).astype(jnp.float32) / buffer
    return jnp.clip(over, -1.0, 0.0)


def overlong(reward: Reward, max_tokens: int, buffer: int) -> Reward:
    """The reward plus the penalty; of several rewards, the penalty is one more."""
    overlong_penalty(jnp.zeros((), jnp.int32), max_tokens, buffer)  # says what is wrong with them

    def shaped(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g *k"], Metrics]:
        rewards, metrics = reward(tasks, completions)
        penalty = overlong_penalty(completions.lengths, max_tokens, buffer)
        metrics = metrics | {"rewards/overlong/mean": mean_of(penalty)}
        if rewards.ndim == 2:
            return rewards + penalty, metrics
        return jnp.concatenate([rewards, penalty[..., None]], -1), metrics

    return shaped
