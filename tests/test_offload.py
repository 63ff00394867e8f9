"""Optimizer state in the host's memory: where it lies, and that nothing else changes."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from jaxtyping import PyTree

from purepost import Algorithm, Mean, TrainState, make_init, make_update, snapshot, train
from purepost.checkpoint import Checkpoints
from purepost.offload import offload
from purepost.optimizers import average_of, averaged
from purepost.sharding import DATA_PARALLEL, make_mesh, sharded
from purepost.tree import named_leaves
from tests.compare import assert_same_bits

MODELS = {"half": jnp.ones((2, 4), jnp.bfloat16), "whole": jnp.zeros(3)}


def descent(**options: Any) -> Algorithm[Any, Any, Any]:
    """Of two leaves, one of them in bf16, with Adam and an average of the weights."""
    optimizer = averaged(optax.adamw(0.1), 0.5)

    def loss(key: Any, models: Any, batch: jax.Array) -> Any:
        error = models["half"].astype(jnp.float32).sum() + models["whole"].sum() - batch
        return {"x": Mean((error**2).sum(), jnp.ones(()))}, {}

    return Algorithm(
        make_init(optimizer, trainable=lambda m: jax.tree.map(lambda _: True, m)),
        lambda key, state, data: (data, {}),
        loss,
        make_update(optimizer, **options),
    )


def data(step: int) -> jax.Array:
    return jnp.asarray([1.0, 2.0, 3.0, jnp.nan if step == 1 else 4.0])  # the second is skipped


def run(algorithm: Any, start: Any, steps: int = 4, **options: Any) -> TrainState:
    """The state after the last step."""
    return list(train(algorithm, start, data, key=jr.key(1), steps=steps, **options))[-1][1]


def memories(x: PyTree) -> dict[str, str]:
    return {name: leaf.sharding.memory_kind for name, leaf in named_leaves(x)}


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "minibatches": 2}], ids=["one", "four"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_state_stays_in_the_hosts_memory_and_the_run_keeps_its_bits(options, fused) -> None:
    algorithm = descent(**options)
    expected = run(algorithm, algorithm.init(jr.key(0), MODELS), fused=fused)
    start = offload(algorithm.init(jr.key(0), MODELS))
    before = memories(start.opt_state)
    after = run(algorithm, start, fused=fused)
    assert memories(after.opt_state) == before
    assert {n: k for n, k in before.items() if k != "pinned_host"} == {
        n: "device" for n in before if n.endswith(("count", "steps"))
    }
    assert "master.half" in before
    assert set(memories((after.params, after.step)).values()) == {"device"}
    assert all(x.is_deleted() for x in jax.tree.leaves(start.opt_state))
    assert_same_bits(after, expected)
    assert_same_bits(average_of(after), average_of(expected))
    assert set(memories(average_of(after)).values()) == {"device"}


def test_it_resumes_from_a_snapshot_and_from_a_checkpoint(tmp_path) -> None:
    algorithm = descent()
    fresh = lambda: offload(algorithm.init(jr.key(0), MODELS))  # noqa: E731
    expected = run(algorithm, fresh())
    two = snapshot(run(algorithm, fresh(), 2))
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.restore(fresh())
        checkpoints.save(two)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        restored = checkpoints.restore(fresh())
    assert int(restored.step) == 2
    for state in (two, restored):
        assert memories(state.opt_state) == memories(expected.opt_state)
        assert_same_bits(run(algorithm, state), expected)


def test_it_lies_on_a_mesh_as_it_would_on_the_devices() -> None:
    algorithm = sharded(descent(), make_mesh(devices=jax.devices()[:1]), DATA_PARALLEL)
    expected = run(algorithm, algorithm.init(jr.key(0), MODELS))
    state = run(algorithm, offload(algorithm.init(jr.key(0), MODELS)))
    moments = state.opt_state.inner.inner[0].mu
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moments)} == {"pinned_host"}
    assert_same_bits(state, expected)
