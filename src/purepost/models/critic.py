"""A policy beside the critic of its states."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..types import Rows
from ..weights import default_trainable
from .computed import Computed
from .containers import WithReference
from .decoder import Decoder
from .heads import TrunkValue, ValueHead, value_model


class ActorCritic(eqx.Module):
    """A policy, the critic of its states, and the model that it must not stray from."""

    policy: Decoder
    critic: ValueHead | TrunkValue
    reference: Decoder | None = None

    def evaluate(self, rows: Rows) -> tuple[Computed, Float[Array, "b t"]]:
        """The policy as it is on these rows, and the values of their trained tokens: one pass where
        both are on one trunk.
        """
        hidden, _ = self.policy(rows)
        match self.critic:
            case ValueHead() as critic:
                values = critic(rows)
            case TrunkValue() as critic:
                values = critic(hidden, rows)
        return Computed(hidden, self.policy.unembed), values


def actor_critic(models: WithReference[Decoder]) -> ActorCritic:
    """A policy and its reference, with a critic on a trunk like the policy's; every value starts
    at 0. Where the policy has adapters the two trunks share their base.
    """
    return ActorCritic(models.policy, value_model(models.policy), models.reference)


def one_trunk(models: WithReference[Decoder], *, detached: bool = False) -> ActorCritic:
    """The same with a critic that is a head on the policy's trunk; every value starts at 0.

    Both losses train the trunk; with `detached` the policy's alone does, and the critic is no more
    than its head.
    """
    head = jnp.zeros((models.policy.config.hidden_size, 1), jnp.float32)
    return ActorCritic(models.policy, TrunkValue(head, detached), models.reference)


def expect_critic(models: Any) -> ActorCritic:
    """The models as they are. ValueError where they have no critic."""
    if not isinstance(models, ActorCritic):
        raise ValueError(
            f"expected a policy with a critic, got {type(models).__name__}; pass "
            "actor_critic(with_reference(policy)) or one_trunk(with_reference(policy))"
        )
    return models


def actor_critic_trainable(models: ActorCritic) -> PyTree:
    """The adapters of policy and critic, or all of their floats if they have none, and the critic's
    head; never the reference.
    """
    trained = ActorCritic(
        default_trainable(models.policy),
        default_trainable(models.critic),
        jax.tree.map(lambda _: False, models.reference),
    )
    return eqx.tree_at(lambda m: m.critic.head, trained, True)
