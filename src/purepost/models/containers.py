"""Several models as one pytree, each by its name."""

from typing import Generic, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..weights import default_trainable, initial_adapters, without_lora

Model = TypeVar("Model")


class WithReference(eqx.Module, Generic[Model]):
    """A policy, and the model it must not stray from; None where nothing holds it."""

    policy: Model
    reference: Model | None = None


def with_reference(policy: Model) -> WithReference[Model]:
    """The policy beside itself as it is now, a trained adapter included. They share every array
    until the policy trains.

    Adapters that still give 0 are left out of the reference: it is then the bare base.
    """
    return WithReference(policy, without_lora(policy) if initial_adapters(policy) else policy)


def policy_trainable(models: WithReference) -> PyTree:
    """The policy's adapters, or all of its floats if it has none; never the reference."""
    return WithReference(
        default_trainable(models.policy), jax.tree.map(lambda _: False, models.reference)
    )


class Distill(eqx.Module, Generic[Model]):
    """A student, and the teacher it is to follow."""

    student: Model
    teacher: Model


def student_trainable(models: Distill) -> PyTree:
    """The student's adapters, or all of its floats if it has none; never the teacher."""
    return Distill(default_trainable(models.student), jax.tree.map(lambda _: False, models.teacher))
