"""The loop: one trace, resume by arithmetic, what is donated, dropout by row, sweeps by vmap."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from purepost import Algorithm, Mean, fuse, loop, make_init, make_update, snapshot, train
from purepost.tree import pad_rows
from tests.compare import assert_close, assert_same_bits


class Batch(eqx.Module):
    """A regression: inputs, targets, weights, and the ids that a row's noise belongs to."""

    x: Float[Array, "b d"]
    y: Float[Array, " b"]
    weight: Float[Array, " b"]
    ids: Float[Array, " b"]


def rows(step: int, n: int = 4, width: int = 3) -> Batch:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(n, width)).astype(np.float32)
    ids = np.arange(n * step, n * step + n, dtype=np.float32)
    return Batch(*map(jnp.asarray, (x, x.sum(1), np.ones(n, np.float32), ids)))


def regression(
    optimizer: Any = None, *, dropout: float = 0.0, traces: list[int] | None = None, **options: Any
) -> Algorithm:
    """Least squares, with dropout keyed by the row's id; the loss appends to `traces`."""
    optimizer = optax.adam(0.1) if optimizer is None else optimizer

    def loss(key, models, batch: Batch):
        if traces is not None:
            traces.append(1)
        keys = jax.vmap(lambda i: jr.fold_in(key, i))(batch.ids.astype(jnp.int32))
        keep = jax.vmap(lambda k: jr.bernoulli(k, 1 - dropout, batch.x.shape[1:]))(keys)
        x = jnp.where(keep, batch.x, 0.0)
        width = batch.x.shape[1]
        error = (x @ models[:width] - batch.y) ** 2 * batch.weight
        return {"mse": Mean(error.sum(), batch.weight.sum())}, {}

    return Algorithm(
        make_init(optimizer, trainable=lambda w: True),
        lambda key, state, data: (data, {}),
        loss,
        make_update(optimizer, **options),
    )


def start(algorithm: Algorithm):
    return algorithm.init(jr.key(0), jnp.zeros(16))


def run(algorithm, state, data=rows, *, steps=5, **options):
    """(snapshot, metrics) after each step."""
    steps_of = train(algorithm, state, data, key=jr.key(3), steps=steps, **options)
    return [(i, snapshot(state), metrics) for i, state, metrics in steps_of]


@pytest.mark.parametrize("fused", [False, True])
def test_five_steps_are_one_trace(fused):
    traces: list[int] = []
    algorithm = regression(traces=traces)
    states = run(algorithm, start(algorithm), fused=fused)
    assert [i for i, _, _ in states] == [1, 2, 3, 4, 5]
    assert [int(s.step) for _, s, _ in states] == [1, 2, 3, 4, 5]
    assert len(traces) == 1


def test_the_host_waits_for_the_step_two_back(monkeypatch):
    waited: list[Any] = []
    monkeypatch.setattr(loop.jax, "block_until_ready", waited.append)
    algorithm = regression()
    yielded = []
    for i, _, metrics in train(algorithm, start(algorithm), rows, key=jr.key(3), steps=5):
        yielded.append(metrics)
        assert len(waited) == max(0, i - loop.AHEAD)
    assert all(a is b for a, b in zip(waited, yielded, strict=False))


def test_a_second_run_of_the_same_algorithm_traces_nothing():
    traces: list[int] = []
    algorithm = regression(traces=traces)
    for _ in range(2):
        run(algorithm, start(algorithm), steps=2)
    assert len(traces) == 1


def test_two_buckets_of_lengths_are_two_traces():
    """Lengths 5, 9, 7, 12 in buckets of 8 and 16."""
    traces: list[int] = []
    algorithm = regression(traces=traces)
    widths = [8, 16, 8, 16]
    run(algorithm, start(algorithm), lambda i: rows(i, width=widths[i]), steps=4)
    assert len(traces) == 2


def test_a_short_last_batch_is_filled_up_and_is_one_trace():
    """Batches of 4, 4, 2: the last, padded with rows of weight 0, has the loss of its two."""
    traces: list[int] = []
    algorithm = regression(traces=traces)
    sizes = [4, 4, 2]
    data = lambda i: pad_rows(rows(i, sizes[i]), 4)  # noqa: E731
    padded = run(algorithm, start(algorithm), data, steps=3)
    assert len(traces) == 1
    plain = run(algorithm, start(algorithm), lambda i: rows(i, sizes[i]), steps=3)
    assert_close(padded[-1][1].params, plain[-1][1].params)
    assert_close(padded[-1][2]["loss"].value, plain[-1][2]["loss"].value)


@pytest.mark.parametrize("fused", [False, True])
def test_resuming_is_the_run_that_was_never_stopped_to_the_bit(fused):
    algorithm = regression(dropout=0.3, microbatches=2, epochs=2, minibatches=2)
    whole = run(algorithm, start(algorithm), fused=fused)
    first = run(algorithm, start(algorithm), steps=3, fused=fused)
    rest = run(algorithm, snapshot(first[-1][1]), fused=fused)
    assert [i for i, _, _ in rest] == [4, 5]
    for (_, state, metrics), (_, again, others) in zip(whole, first + rest, strict=True):
        assert_same_bits(state, again)
        assert_same_bits(metrics, others)


def test_a_run_that_is_done_yields_nothing():
    algorithm = regression()
    (last,) = run(algorithm, start(algorithm), steps=1)
    assert run(algorithm, snapshot(last[1]), steps=1) == []


def test_dropout_belongs_to_the_rows_id_whatever_the_micro_batches_and_the_order():
    single, split = (regression(optax.sgd(0.1), dropout=0.5, microbatches=n) for n in (1, 3))
    order = jnp.asarray([2, 0, 3, 1])
    mixed = lambda i: jax.tree.map(lambda x: x[order], rows(i))  # noqa: E731
    expected = run(single, start(single), steps=2)[-1]
    for algorithm, data in ((split, rows), (single, mixed), (split, mixed)):
        got = run(algorithm, start(algorithm), data, steps=2)[-1]
        assert_close(got[1].params, expected[1].params)
        assert_close(got[2]["loss"].value, expected[2]["loss"].value)
    plain = regression(optax.sgd(0.1))
    without = run(plain, start(plain), steps=2)[-1]
    assert np.abs(np.asarray(without[1].params - expected[1].params)).max() > 1e-2


def test_a_step_uses_up_parameters_and_optimizer_state_and_nothing_else():
    algorithm = regression()
    models = jnp.zeros(16)
    state = algorithm.init(jr.key(0), models)
    kept = snapshot(state)
    data = rows(0)
    next(train(algorithm, state, lambda i: data, key=jr.key(0), steps=1))
    used = [x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state))]
    assert used[0] and all(used)
    assert not state.step.is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves((data, models, kept)))
    np.testing.assert_array_equal(kept.params, np.zeros(16))


def addresses(state) -> set[int]:
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return {x.unsafe_buffer_pointer() for x in leaves if x.ndim}


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_writes_parameters_and_optimizer_state_where_they_lay(fused):
    algorithm = regression(microbatches=2)
    first = algorithm.init(jr.key(0), jnp.zeros(4096))
    before = addresses(first)
    for _, state, _ in train(algorithm, first, rows, key=jr.key(0), steps=3, fused=fused):
        assert addresses(state) == before


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def live_arrays(algorithm, *, steps: int) -> Iterator[tuple[int, int]]:
    """(step, arrays that are alive) after each step but the first ones."""
    for i, _, _ in train(algorithm, start(algorithm), rows, key=jr.key(3), steps=steps, fused=True):
        if i > 10:
            yield i, len(jax.live_arrays())


def test_a_hundred_steps_keep_as_many_arrays_alive_as_ten():
    counts = {count for _, count in live_arrays(regression(), steps=100)}
    assert max(counts) - min(counts) <= 2  # garbage of other tests goes when Python likes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_over_a_thousand_steps():
    size, counts = 0, set()
    for i, count in live_arrays(regression(), steps=1000):
        size = resident() if i == 100 else size
        counts.add(count)
    assert max(counts) - min(counts) <= 2
    assert resident() - size < 8 * 2**20


def test_frozen_leaves_survive_and_stay_the_same_arrays():
    models = {"frozen": jnp.ones(16), "w": jnp.zeros(16)}
    inner = regression()
    algorithm = Algorithm(
        make_init(optax.adam(0.1), trainable=lambda m: {"frozen": False, "w": True}),
        inner.rollout,
        lambda key, models, batch: inner.loss(key, models["w"] * models["frozen"], batch),
        inner.update,
    )
    state = algorithm.init(jr.key(0), models)
    for _, after, _ in train(algorithm, state, rows, key=jr.key(0), steps=2):
        np.testing.assert_array_equal(after.frozen["frozen"], np.ones(16))
    assert not models["frozen"].is_deleted()


def test_an_optimizer_that_starts_from_the_parameters_can_be_donated():
    algorithm = regression(optax.contrib.schedule_free_sgd(0.1))
    assert len(run(algorithm, start(algorithm), steps=2)) == 2


def test_a_fused_step_is_rollout_and_update_to_rounding():
    algorithm = regression(dropout=0.3, microbatches=2)
    one = run(algorithm, start(algorithm), steps=1)[0]
    state, metrics = fuse(algorithm)(jr.fold_in(jr.key(3), 0), start(algorithm), rows(0))
    assert_close(state.params, one[1].params, relative=1e-6)
    assert metrics.keys() == one[2].keys()


def test_rollout_and_loss_get_different_keys_and_every_step_others():
    def noisy(key, state, data):
        return data, {"rollout": Mean(jr.uniform(key), jnp.ones(()))}

    def loss(key, models, batch):
        terms = {"x": Mean(models.sum(), jnp.ones(()))}
        return terms, {"loss_key": Mean(jr.uniform(key), jnp.ones(()))}

    base = regression()
    algorithm = Algorithm(base.init, noisy, loss, base.update)
    metrics = [m for _, _, m in run(algorithm, start(algorithm), steps=3)]
    drawn = [float(m[name].value) for m in metrics for name in ("rollout", "loss_key")]
    assert len(set(drawn)) == 6


def test_a_sweep_over_learning_rates_is_a_vmap_over_factory_calls():
    rates = jnp.asarray([0.01, 0.1, 0.3])

    def losses(rate):
        algorithm = regression(optax.sgd(rate))
        state, data = start(algorithm), rows(0)
        step = fuse(algorithm)
        found = []
        for i in range(3):
            state, metrics = step(jr.key(i), state, data)
            found.append(metrics["loss"].value)
        return jnp.stack(found), state.params

    swept, params = jax.vmap(losses)(rates)
    assert swept.shape == (3, 3)
    for i, rate in enumerate(rates):
        alone, w = losses(rate)
        np.testing.assert_allclose(swept[i], alone, rtol=1e-5)
        np.testing.assert_allclose(params[i], w, rtol=1e-5, atol=1e-6)
    assert float(swept[0, 2]) != float(swept[1, 2])


def test_seeds_mapped_over_a_fused_step_equal_the_single_run_to_the_bit():
    algorithm = regression(dropout=0.3)
    data = rows(0)

    def one(seed):
        state, _ = fuse(algorithm)(jr.key(seed), start(algorithm), data)
        return state.params

    mapped = jax.jit(lambda s: jax.lax.map(one, s))(jnp.arange(3))
    for seed in range(3):
        assert_same_bits(mapped[seed], jax.jit(one)(seed))
    assert (mapped[0] != mapped[1]).any()
