"""Which episodes a loss leaves out. They stay in their groups' statistics."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .advantages import Outcomes, group_statistics

# outcomes → which episodes to keep
Filter = Callable[[Outcomes], Bool[Array, " n"]]


def finished(outcomes: Outcomes) -> Bool[Array, " n"]:
    """Those that were not cut off by the limit on tokens. Source: Yu et al., DAPO, 2503.14476,
    §3.4.
    """
    return ~outcomes.truncated


def informative(outcomes: Outcomes) -> Bool[Array, " n"]:
    """Those of groups whose rewards differ. Source: Yu et al., DAPO, 2503.14476, §3.2."""
    return group_statistics(outcomes).informative


def ended_by(*reasons: int) -> Filter:
    """Those that ended for one of these reasons: LENGTH, STOP, MAX_TURNS, TIMEOUT, ERROR.

    Error: episodes that say nothing of how they ended.
    """

    def keep(outcomes: Outcomes) -> Bool[Array, " n"]:
        if outcomes.finish is None:
            raise ValueError("expected outcomes with how they ended, got none; give `finish`")
        return (outcomes.finish[:, None] == jnp.asarray(reasons, jnp.int32)).any(1)

    return keep


def at_most(max_tokens: int) -> Filter:
    """Those of at most `max_tokens` sampled tokens."""
    if max_tokens < 1:
        raise ValueError(f"expected max_tokens ≥ 1, got {max_tokens}")
    return lambda outcomes: outcomes.lengths <= max_tokens


def fresh(max_staleness: int) -> Filter:
    """Those sampled by a policy that has trained for at most `max_staleness` steps since.

    Source: Fu et al., AReaL, 2505.24298, §5.1.
    """
    if max_staleness < 0:
        raise ValueError(f"expected max_staleness ≥ 0 steps, got {max_staleness}")

    def keep(outcomes: Outcomes) -> Bool[Array, " n"]:
        if outcomes.staleness is None:
            return jnp.ones(outcomes.rewards.shape, bool)
        return outcomes.staleness <= max_staleness

    return keep
