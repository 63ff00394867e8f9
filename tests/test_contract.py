"""The contract of every factory that `purepost.algorithms` exports, with adapters and without.

A new factory needs a probe in experiments/probes; without one the first test fails.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import PROBES as SHELF
from experiments.probes import Probe, tiny
from experiments.probes.sampled import best_reward, mean_reward
from purepost import Algorithm, Mean, TrainState, algorithms, fuse, snapshot, train
from purepost.mean import Metrics
from purepost.tree import count, named_leaves, pad_rows
from purepost.types import num_rows
from tests import games
from tests.batches import all_rows, padding, poison, recording
from tests.compare import assert_close, assert_same_bits, names_of

PROBES = SHELF | games.PROBES
STEPS, SOLVED = 40, 0.1  # how near the optimum to come, in nats or in reward, of 2 and .6 at first


@dataclass
class Setup:
    """A probe with its model, and what several tests share so that it is compiled once."""

    probe: Probe
    lora: bool
    models: Any
    algorithm: Algorithm  # by Adam; its loss counts its traces
    traces: list[int]
    batch: Any
    split: Algorithm  # the same in micro-batches

    def state(self) -> TrainState:
        """The state before the first step."""
        return self.algorithm.init(jr.key(0), self.models)

    def run(self, steps: int, seed: int = 0) -> list[tuple[TrainState, Metrics]]:
        """The states and metrics of a run."""
        data = self.probe.data(seed)
        loop = train(self.algorithm, self.state(), data, key=jr.key(seed), steps=steps)
        return [(snapshot(state), metrics) for _, state, metrics in loop]

    def gradient(self, batch: Any, *, split: bool = False) -> tuple[Any, Metrics]:
        """(gradient, metrics) of a batch, as the factory's own update finds them."""
        algorithm = replace(
            self.split if split else self.algorithm, rollout=lambda key, state, data: (data, {})
        )
        state = self.state()
        # A little off the start, so that adapters and ratios are no longer trivial.
        state = eqx.tree_at(lambda s: s.params, state, jax.tree.map(nudge, state.params))
        loop = train(algorithm, state, lambda step: batch, key=jr.key(1), steps=1)
        _, state, metrics = next(loop)
        return state.opt_state.inner.gradient, metrics


def nudge(x: Any) -> Any:
    """x, and a small wave over it."""
    wave = 0.02 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32))
    return x + wave.reshape(x.shape).astype(x.dtype)


def assert_equal_steps(a: tuple[Any, Metrics], b: tuple[Any, Metrics]) -> None:
    """The gradients agree to 1e-5, and so do the metrics, the loss included."""
    assert_close(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    for name, mean in a[1].items():
        np.testing.assert_allclose(mean.value, b[1][name].value, rtol=1e-5, atol=1e-6)


def factories() -> dict[str, Any]:
    """The public functions of purepost.algorithms."""
    found = inspect.getmembers(algorithms, inspect.isfunction)
    return {name: f for name, f in found if not name.startswith("_")}


CASES = [(name, lora) for name, probe in PROBES.items() for lora in probe.lora]
ONE_EACH = [(name, probe.lora[-1]) for name, probe in PROBES.items()]


def label(case: tuple[str, bool]) -> str:
    """The name of a case."""
    return f"{case[0]}{', LoRA' * case[1]}"


def set_up(probe: Probe, lora: bool) -> Setup:
    """A probe with adapters or without, and a batch of it."""
    optimizer = recording(optax.adam(0.01))
    algorithm = probe.algorithm(optimizer)
    traces: list[int] = []

    def counted(key: Any, models: Any, batch: Any) -> Any:
        traces.append(1)
        return algorithm.loss(key, models, batch)

    models = probe.models(tiny(lora=lora))
    batch, _ = algorithm.rollout(jr.key(5), algorithm.init(jr.key(0), models), probe.data(0)(0))
    # 2 divides the rows; 3 does not, and fills them up.
    split = probe.algorithm(optimizer, microbatches=2 if lora else 3)
    return Setup(probe, lora, models, replace(algorithm, loss=counted), traces, batch, split)


@pytest.fixture(scope="session", params=CASES, ids=label)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    name, lora = request.param
    yield set_up(PROBES[name], lora)
    jax.clear_caches()  # as many probes as there are would not fit into one process


def test_every_factory_has_a_probe():
    missing = factories().keys() - {p.factory for p in PROBES.values()}
    assert not missing, f"add a probe to experiments/probes for {sorted(missing)}"
    assert {p.factory for p in PROBES.values()} <= factories().keys()
    assert {"sft", "grpo", "rloo", "dr_grpo"} <= factories().keys()


def test_the_same_seed_gives_the_same_bits_and_two_steps_compile_once(setup):
    first = setup.run(2)
    traced = len(setup.traces)
    longer = setup.run(3)
    assert len(setup.traces) == traced > 0
    for (state, metrics), (again, others) in zip(first, longer, strict=False):
        assert_same_bits(state, again)
        assert_same_bits(metrics, others)
    assert int(longer[-1][0].step) == 3


def test_another_seed_gives_another_batch(setup):
    state, data = setup.state(), setup.probe.data
    same, _ = setup.algorithm.rollout(jr.key(5), state, data(0)(0))
    assert_same_bits(same, setup.batch)
    seeds = [(5, 1)] + [(6, 0)] * setup.probe.samples
    for key, seed in seeds:
        other, _ = setup.algorithm.rollout(jr.key(key), state, data(seed)(0))
        tokens = [np.asarray(all_rows(b)[0].tokens) for b in (setup.batch, other)]
        assert (tokens[0] != tokens[1]).any()


def test_micro_batches_change_nothing(setup):
    whole = setup.gradient(setup.batch)
    assert optax.tree.norm(whole[0]) > 1e-3
    assert_equal_steps(setup.gradient(setup.batch, split=True), whole)


def test_rows_of_zeros_change_nothing(setup):
    """Half of the rows and as many rows of zeros have the mean of that half twice over."""
    rows = num_rows(setup.batch)
    half = jax.tree.map(lambda x: x[: rows // 2], setup.batch)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), half)
    assert_equal_steps(setup.gradient(pad_rows(half, rows)), setup.gradient(twice))


def test_masked_positions_do_not_matter(setup):
    assert all(padding(rows).any() for rows in all_rows(setup.batch))
    assert_equal_steps(setup.gradient(poison(setup.batch)), setup.gradient(setup.batch))


def test_the_order_of_rows_does_not_matter(setup):
    rows = num_rows(setup.batch)
    order = jnp.asarray(np.random.default_rng(0).permutation(rows))
    assert not (order == jnp.arange(rows)).all()
    moved = jax.tree.map(lambda x: x[order], setup.batch)
    assert_equal_steps(setup.gradient(moved), setup.gradient(setup.batch))


def test_only_what_trains_moves(setup):
    start = setup.state()
    state, _ = setup.run(3)[-1]
    assert_same_bits(setup.probe.still(state.frozen), setup.probe.still(start.frozen))
    before, after = names_of(start.params), names_of(state.params)
    still = [name for name in before if (before[name] == after[name]).all()]
    assert not still
    if setup.lora:
        assert all(name.endswith((".a", ".b")) for name in before)
    # Two moments and a gradient for every trained number, a count, and nothing else.
    assert count(state.opt_state.inner) == 3 * count(state.params) + 1
    dtypes = {x.dtype for n, x in named_leaves(state.opt_state.inner) if not n.endswith("count")}
    assert dtypes == {jnp.dtype(jnp.float32)}


def test_a_loss_of_zero_swapped_in_leaves_parameters(setup):
    def zero(key: Any, models: Any, batch: Any) -> Any:
        return {"zero": Mean(jnp.zeros(()), jnp.ones(()))}, {}

    start = setup.state()
    kept = snapshot(start)
    swapped = replace(setup.algorithm, loss=zero)
    for _, state, _ in train(swapped, start, setup.probe.data(0), key=jr.key(0), steps=1):
        assert_same_bits(state.params, kept.params)
        assert int(state.step) == 1


def test_a_loss_that_is_not_a_number_skips_the_step(setup):
    def broken(key: Any, models: Any, batch: Any) -> Any:
        total = sum(x.sum() for x in jax.tree.leaves(models) if eqx.is_inexact_array(x))
        return {"nan": Mean(jnp.asarray(total) * jnp.nan, jnp.ones(()))}, {}

    start = setup.state()
    kept = snapshot(start)
    swapped = replace(setup.algorithm, loss=broken)
    for _, state, metrics in train(swapped, start, setup.probe.data(0), key=jr.key(0), steps=1):
        assert_same_bits((state.params, state.opt_state), (kept.params, kept.opt_state))
        assert int(state.step) == 1
        assert float(metrics["skipped"].value) == 1.0


# The whole step as one program is the slowest to compile: with adapters, where there are any.
@pytest.mark.parametrize("setup", ONE_EACH, indirect=True, ids=label)
def test_a_fused_step_is_rollout_and_update(setup):
    """Equal to rounding, which Adam passes on where a gradient nearly cancels: one program fuses
    float operations otherwise than two do.
    """
    state, metrics = setup.run(1)[0]
    key, data = jr.fold_in(jr.key(0), 0), setup.probe.data(0)(0)
    fused, more = fuse(setup.algorithm)(key, setup.state(), data)
    assert more.keys() == metrics.keys()
    assert_close(fused.params, state.params)


def test_the_probe_is_solved(setup):
    state, metrics = setup.run(STEPS)[-1]
    assert "entropy" in metrics or setup.probe.measure not in (mean_reward, best_reward)
    gap = setup.probe.gap(state.models, metrics, setup.probe.data(0)(0))
    assert gap < SOLVED


CLAUSES = [
    f
    for name, f in list(globals().items())
    if name.startswith("test_") and "setup" in inspect.signature(f).parameters
]


def check(probe: Probe, *, lora: bool = False) -> None:
    """Hold a probe to every clause above, one after the other."""
    setup = set_up(probe, lora)
    for clause in CLAUSES:
        clause(setup)
