"""Learning rates by path and averages of weights: explicit twins, low precision, skipped steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import tiny
from experiments.probes.supervised import forked
from purepost import Mean, make_init, make_update
from purepost.algorithms import sft
from purepost.optimizers import average_of, averaged, lora_plus, polyak, scale_by_path
from purepost.tree import named_leaves
from tests.compare import assert_close, assert_same_bits, names_of

RATIO, RATE = 16.0, 0.01


def run(optimizer, models, steps):
    """The states before and after each step of SFT on the forked sequences."""
    algorithm = sft(optimizer)
    state = algorithm.init(jr.key(0), models)
    jitted = eqx.filter_jit(lambda s: algorithm.update(algorithm.loss, jr.key(1), s, forked(0)(0)))
    states = [state]
    for _ in range(steps):
        states.append(jitted(states[-1])[0])
    return states


@pytest.mark.parametrize("make", [optax.sgd, optax.adamw], ids=["sgd", "adamw"])
def test_lora_plus_is_an_optimizer_for_a_and_a_faster_one_for_b(make):
    """As by two optimizers, each over its factors."""
    model = tiny(lora=True)
    plus = run(optax.chain(make(RATE), lora_plus(RATIO)), model, 3)

    def factors(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1]).strip("."), params)

    two = optax.partition({"a": make(RATE), "b": make(RATIO * RATE)}, factors)
    assert_close(plus[-1].params, run(two, model, 3)[-1].params)


def test_a_learning_rate_by_path_is_that_of_the_last_pattern_found():
    params = {"embed": jnp.ones(2), "layers": {"q": jnp.ones(2), "norm": jnp.ones(2)}}
    rates = {r"layers": 0.5, r"norm$": 0.0}
    optimizer = optax.chain(optax.sgd(1.0), scale_by_path(rates))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    for name, expected in (("embed", -1), ("layers.q", -0.5), ("layers.norm", 0)):
        np.testing.assert_array_equal(dict(named_leaves(updates))[name], [expected] * 2)


def test_patterns_that_match_nothing_and_ratios_out_of_range_are_errors():
    with pytest.raises(ValueError, match="a pattern that matches some path"):
        sft(optax.chain(optax.sgd(0.1), lora_plus())).init(jr.key(0), tiny(lora=False))
    with pytest.raises(ValueError, match="0 < ratio, got 0"):
        lora_plus(0.0)
    with pytest.raises(ValueError, match="0 ≤ factor of 'q'"):
        scale_by_path({"q": -1.0})
    with pytest.raises(ValueError, match="0 ≤ decay < 1, got 1"):
        averaged(optax.sgd(0.1), 1.0)
    with pytest.raises(ValueError, match="start ≥ 0"):
        polyak(-1)


def test_averages_are_those_of_the_weights_that_the_run_went_through():
    """An exponential one from the start on, and the mean from step 2 on, in float64."""
    model = tiny(lora=True)
    plain = run(optax.adam(RATE), model, 4)
    moving = run(averaged(optax.adam(RATE), 0.9), model, 4)
    mean = run(averaged(optax.adam(RATE), polyak(start=1)), model, 4)
    for one, two, three in zip(plain, moving, mean, strict=True):
        assert_same_bits(one.params, two.params)
        assert_same_bits(one.params, three.params)
    path = [names_of(s.params) for s in plain]
    expected = {n: x.astype(np.float64) for n, x in path[0].items()}
    for weights in path[1:]:
        expected = {n: 0.9 * x + 0.1 * weights[n] for n, x in expected.items()}
    found = names_of(average_of(moving[-1]))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-7)
    found = names_of(average_of(mean[-1]))
    for name in expected:
        x = np.mean([weights[name] for weights in path[2:]], 0, dtype=np.float64)
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-7)
    assert_same_bits(average_of(mean[1]), mean[1].models)


def test_an_average_is_of_float32_masters_and_comes_in_the_models_dtype():
    """1 − .001 a hundred times, averaged: .94950; steps of bf16 would have stayed at 1."""
    optimizer = averaged(optax.sgd(0.001), polyak())
    init = make_init(optimizer, trainable=lambda m: True)
    update = make_update(optimizer)

    def loss(key, models, batch):
        return {"x": Mean(models.sum().astype(jnp.float32), jnp.ones(()))}, {}

    @jax.jit
    def hundred(state):
        rows = jnp.zeros((1, 1))
        step = lambda s, _: (update(loss, jr.key(0), s, rows)[0], None)  # noqa: E731
        return jax.lax.scan(step, state, length=100)[0]

    state = hundred(init(jr.key(0), jnp.ones(1, jnp.bfloat16)))
    np.testing.assert_allclose(state.opt_state.inner.average, [0.9495], rtol=1e-5)
    assert average_of(state).dtype == jnp.bfloat16


def test_a_skipped_step_does_not_count_in_the_average():
    optimizer = averaged(optax.sgd(1.0), polyak())
    state = make_init(optimizer, trainable=lambda m: True)(jr.key(0), jnp.zeros(1))
    update = make_update(optimizer)

    def loss(key, models, batch):
        return {"x": Mean(models.sum() * batch[0, 0], jnp.ones(()))}, {}

    for slope in (1.0, np.nan, 3.0):
        state, _ = update(loss, jr.key(0), state, jnp.full((1, 1), slope, jnp.float32))
    assert int(state.opt_state.inner.steps) == 2
    np.testing.assert_allclose(average_of(state), [(-1 - 4) / 2])


def test_the_average_is_found_within_a_chain_and_missed_where_there_is_none():
    state = sft(optax.chain(averaged(optax.sgd(0.1)), optax.identity())).init(
        jr.key(0), tiny(lora=True)
    )
    assert_same_bits(average_of(state), state.models)
    with pytest.raises(ValueError, match="one average, got 0; wrap it in `averaged`"):
        average_of(sft(optax.sgd(0.1)).init(jr.key(0), tiny(lora=True)))
