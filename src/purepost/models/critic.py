"""A policy beside the critic of its states."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..weights import default_trainable
from .containers import WithReference
from .decoder import Decoder
from .heads import ValueHead, value_model


class ActorCritic(eqx.Module):
    """A policy, the critic of its states, and the model that it must not stray from."""

    policy: Decoder
    critic: ValueHead
    reference: Decoder | None = None


def actor_critic(models: WithReference[Decoder]) -> ActorCritic:
    """A policy and its reference, with a critic on a trunk like the policy's; every value starts
    at 0.
    """
    return ActorCritic(models.policy, value_model(models.policy), models.reference)


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
