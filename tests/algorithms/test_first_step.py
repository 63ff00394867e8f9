"""On-policy, at the first step, every policy gradient is the same one: REINFORCE's."""

import inspect
from typing import Any, get_args

import equinox as eqx
import jax
import jax.random as jr
import optax
from jaxtyping import Array, PyTree

from experiments.probes import PROBES, tiny
from experiments.probes.sampled import COLLECT, tasks
from purepost import algorithms
from purepost.advantages import group_centered
from purepost.losses import sequence_mean
from purepost.models.containers import with_reference
from purepost.policy_batch import PolicyBatch
from tests.compare import assert_close

SGD = optax.sgd(0.1)


def policy_gradients() -> list[str]:
    """The factories whose batch is a PolicyBatch."""
    found = inspect.getmembers(algorithms, inspect.isfunction)
    return [n for n, f in found if PolicyBatch in get_args(inspect.signature(f).return_annotation)]


def test_all_policy_gradients_agree_at_zero_change() -> None:
    """With one advantage and one aggregate, on one batch: objectives, clips and gates of every
    factory leave −A ∇log π. The gradient is taken by the head; all that lies below follows.
    """
    names = policy_gradients()
    assert {"grpo", "reinforce", "gspo", "cispo", "sapo", "vespo", "dppo", "luspo"} <= set(names)
    models = with_reference(tiny(lora=False))
    plain = algorithms.reinforce(SGD, COLLECT, advantage=group_centered, aggregate=sequence_mean)
    state = plain.init(jr.key(0), models)
    batch, _ = plain.rollout(jr.key(1), state, tasks(0)(0))
    losses = {n: PROBES[n].algorithm(SGD, aggregate=sequence_mean).loss for n in names}

    @eqx.filter_jit
    def gradients(head: Any, models: Any, batch: PolicyBatch) -> dict[str, PyTree]:
        def value(head: Array, name: str) -> Array:
            swapped = eqx.tree_at(lambda m: m.policy.head, models, head)
            return losses[name](jr.key(2), swapped, batch)[0]["policy"].value

        return {name: jax.grad(value)(head, name) for name in names}

    found = gradients(models.policy.head, models, batch)
    assert optax.tree.norm(found["reinforce"]) > 1e-3
    for name in names:
        assert_close(found[name], found["reinforce"])
