"""init and update: exact accumulation, frozen leaves, skipped steps, float32 masters, errors."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from purepost import Algorithm, Mean, TrainState, make_init, make_update
from purepost.algorithm import accumulate_gradient, combine_metrics
from purepost.mean import scalar_mean
from purepost.tree import named_leaves


class Pair(eqx.Module):
    """Two vectors; in a filter two bools, and None in the half that lacks one."""

    a: Any
    b: Any


class Tokens(eqx.Module):
    """Token losses, a factor for each, and which count."""

    x: Float[Array, "b t"]
    mask: Float[Array, "b t"]


def pair(a: float, b: float, dtype=jnp.float32) -> Pair:
    return Pair(jnp.full(1, a, dtype), jnp.full(1, b, dtype))


def only_b(models: Pair) -> Any:
    return Pair(False, True)


def everything(models: Any) -> Any:
    return jax.tree.map(eqx.is_inexact_array, models)


def state_of(optimizer, models, trainable=everything) -> TrainState:
    return make_init(optimizer, trainable=trainable)(jr.key(0), models)


def step(optimizer, loss, state, batch, **options):
    """One jitted update."""
    update = make_update(optimizer, **options)
    return jax.jit(lambda s, b: update(loss, jr.key(1), s, b))(state, batch)


def constant_gradients(a: float, b: float):
    """A loss whose gradient with respect to a and b is known."""

    def loss(key, models: Pair, batch):
        total = a * models.a.sum().astype(jnp.float32) + b * models.b.sum().astype(jnp.float32)
        return {"x": Mean(total, jnp.ones(()))}, {}

    return loss


def token_loss(key, models: Pair, batch: Tokens):
    """Σ b·x·m / Σ m: d/db is the token mean of x."""
    total = (models.b[0] * batch.x * batch.mask).sum()
    return {"x": Mean(total, batch.mask.sum())}, {"seen": Mean(total, batch.mask.sum())}


ONE_ROW = jnp.zeros((1, 1))
# Token losses [4], [1, 2, 3], and a row with none: 10 over 4 tokens.
THREE = Tokens(
    jnp.asarray([[4.0, 9, 9], [1, 2, 3], [9, 9, 9]]),
    jnp.asarray([[1.0, 0, 0], [1, 1, 1], [0, 0, 0]]),
)


@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_every_token_counts_the_same_for_any_number_of_micro_batches(rows, microbatches):
    """2.5, never the mean of means 3.0, nor 10, 1.25 or NaN."""
    batch = jax.tree.map(lambda x: x[jnp.asarray(rows)], THREE)
    state = state_of(optax.sgd(1.0), pair(0, 1))
    state, metrics = step(optax.sgd(1.0), token_loss, state, batch, microbatches=microbatches)
    np.testing.assert_allclose(metrics["loss"].value, 2.5, rtol=1e-6)
    np.testing.assert_allclose(state.params.b, [1 - 2.5], rtol=1e-6)
    np.testing.assert_allclose(metrics["seen"].value, 2.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"].value, 2.5, rtol=1e-6)
    assert float(metrics["skipped"].value) == 0.0


def test_terms_keep_their_own_denominators():
    """One term over 4 tokens and one over 2 rows, in two micro-batches of unequal tokens."""

    def loss(key, models: Pair, batch: Tokens):
        rows = (batch.mask.sum(1) > 0).astype(jnp.float32)
        values = models.b[0] * batch.x[:, 0] * rows
        return token_loss(key, models, batch)[0] | {"value": Mean(values.sum(), rows.sum())}, {}

    for microbatches in (1, 2, 3):
        state = state_of(optax.sgd(1.0), pair(0, 1))
        state, metrics = step(optax.sgd(1.0), loss, state, THREE, microbatches=microbatches)
        np.testing.assert_allclose(metrics["loss/x"].value, 2.5, rtol=1e-6)
        np.testing.assert_allclose(metrics["loss/value"].value, (4 + 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"].value, 5.0, rtol=1e-6)
        np.testing.assert_allclose(state.params.b, [1 - 5.0], rtol=1e-6)


def test_a_term_of_no_weight_is_0_beside_one_that_counts():
    def loss(key, models: Pair, batch: Tokens):
        empty = Mean(models.b.sum() * 0.0, jnp.zeros(()))
        return token_loss(key, models, batch)[0] | {"empty": empty}, {}

    state = state_of(optax.sgd(1.0), pair(0, 1))
    _, metrics = step(optax.sgd(1.0), loss, state, THREE, microbatches=2)
    np.testing.assert_allclose(metrics["loss"].value, 2.5, rtol=1e-6)
    assert float(metrics["loss/empty"].value) == 0.0


def test_accumulate_gradient_is_float32_whatever_the_parameters():
    models = pair(0, 1, jnp.bfloat16)

    def loss(key, models: Pair, batch: Tokens):
        total = (models.b[0].astype(jnp.float32) * batch.x * batch.mask).sum()
        return {"x": Mean(total, batch.mask.sum())}, {}

    # A sum of 512 ones: a bf16 accumulator would stop at 256.
    batch = Tokens(jnp.full((512, 1), 1.0), jnp.ones((512, 1)))
    empty = Pair(None, None)
    for n in (1, 512):
        _, _, grads = accumulate_gradient(loss, jr.key(0), models, empty, batch, n)
        assert grads.b is not None and grads.b.dtype == jnp.float32
        np.testing.assert_allclose(grads.b, [1.0], rtol=1e-6)


def test_frozen_leaves_stay_while_decay_moves_the_others():
    """AdamW, lr .1, decay .1, gradients 0: a stays 10 to the bit, b becomes 9.9."""
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    state = state_of(optimizer, pair(10, 10), only_b)
    state, _ = step(optimizer, constant_gradients(0, 0), state, ONE_ROW)
    assert state.params.a is None and state.frozen.b is None
    assert float(state.frozen.a[0]) == 10.0
    np.testing.assert_allclose(state.params.b, [9.9], rtol=1e-6)
    assert state.models.a is not None and state.models.b is not None


def test_the_norm_that_clips_leaves_out_frozen_leaves():
    """Gradients 30 and 40, clip 5: b's becomes 5, not 4."""
    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(1.0))
    state = state_of(optimizer, pair(10, 10), only_b)
    state, metrics = step(optimizer, constant_gradients(30, 40), state, ONE_ROW)
    np.testing.assert_allclose(state.params.b, [5.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"].value, 40.0, rtol=1e-6)


def test_no_moments_for_frozen_leaves():
    state = state_of(optax.adam(0.1), pair(10, 10), only_b)
    names = [name for name, _ in named_leaves(state.opt_state)]
    assert len(names) == 3 and not any(name.endswith(".a") for name in names)


def test_frozen_codes_keep_their_bits():
    """Integers beside floats, as a quantized base has them."""
    models = {"codes": jnp.asarray([255, 7], jnp.uint8), "w": jnp.ones(2)}

    def loss(key, models, batch):
        total = (models["codes"].astype(jnp.float32) * models["w"]).sum()
        return {"x": Mean(total, jnp.ones(()))}, {}

    state = state_of(optax.sgd(0.1), models)
    state, _ = step(optax.sgd(0.1), loss, state, ONE_ROW)
    assert state.frozen["codes"].dtype == jnp.uint8
    np.testing.assert_array_equal(state.frozen["codes"], [255, 7])
    np.testing.assert_allclose(state.params["w"], [1 - 25.5, 1 - 0.7], rtol=1e-6)


def test_a_bf16_parameter_gathers_small_updates_in_its_master():
    """1 − .001 a hundred times: .9, and .8984375 in bf16; without a master it would stay 1."""
    optimizer = optax.sgd(0.001)
    state = state_of(optimizer, pair(0, 1, jnp.bfloat16))
    update = make_update(optimizer)
    loss = constant_gradients(0, 1)

    @jax.jit
    def hundred(state):
        def body(state, _):
            return update(loss, jr.key(0), state, ONE_ROW)[0], None

        return jax.lax.scan(body, state, length=100)[0]

    state = hundred(state)
    assert state.params.b.dtype == jnp.bfloat16
    assert float(state.params.b[0]) == 0.8984375
    assert state.opt_state.master.b.dtype == jnp.float32
    np.testing.assert_allclose(state.opt_state.master.b, [0.9], rtol=1e-5)


def test_moments_of_bf16_parameters_are_float32_and_float32_ones_have_no_master():
    state = state_of(optax.adam(0.1), Pair(jnp.ones(1, jnp.bfloat16), jnp.ones(1)))
    floats = [x for n, x in named_leaves(state.opt_state.inner) if not n.endswith("count")]
    assert len(floats) == 4 and {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
    assert [name for name, _ in named_leaves(state.opt_state.master)] == ["a"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_that_is_not_finite_leaves_everything_to_the_bit(bad, microbatches):
    optimizer = optax.adamw(0.1)
    start = state_of(optimizer, pair(1, 2))
    start, _ = step(optimizer, token_loss, start, THREE)
    batch = dataclasses.replace(THREE, x=THREE.x.at[1, 2].set(bad))
    state, metrics = step(optimizer, token_loss, start, batch, microbatches=microbatches)
    for old, new in zip(
        jax.tree.leaves((start.params, start.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)
    assert int(state.step) == 2
    assert float(metrics["skipped"].value) == 1.0
    assert float(metrics["loss"].weight) == 0.0 == float(metrics["loss"].value)


def test_an_infinite_gradient_of_a_finite_loss_is_skipped():
    def loss(key, models: Pair, batch):
        return {"x": Mean(jnp.sqrt(models.b[0]), jnp.ones(()))}, {}

    start = state_of(optax.sgd(1.0), pair(1, 0))
    state, metrics = step(optax.sgd(1.0), loss, start, ONE_ROW)
    assert float(state.params.b[0]) == 0.0
    assert float(metrics["skipped"].value) == 1.0


def test_a_batch_in_which_nothing_counts_is_skipped_decay_included():
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    start = state_of(optimizer, pair(10, 10))
    batch = dataclasses.replace(THREE, mask=THREE.mask * 0)
    state, metrics = step(optimizer, token_loss, start, batch)
    np.testing.assert_array_equal(state.params.b, start.params.b)
    assert float(metrics["skipped"].value) == 1.0
    assert int(state.opt_state.inner[0].count) == 0


def test_one_bad_minibatch_skips_that_one_alone():
    optimizer = optax.sgd(1.0)
    batch = Tokens(jnp.asarray([[1.0], [np.nan], [3.0], [5.0]]), jnp.ones((4, 1)))
    state = state_of(optimizer, pair(0, 0))
    state, metrics = step(optimizer, token_loss, state, batch, minibatches=2)
    np.testing.assert_allclose(state.params.b, [-2.0])  # rows 0 and 2; rows 1 and 3 are lost
    np.testing.assert_allclose(metrics["skipped"].value, 0.5)
    np.testing.assert_allclose(metrics["loss"].weight, 1.0)


def test_epochs_and_minibatches_are_optimizer_steps_in_strided_order():
    """Each minibatch's gradient is the mean of its rows; a schedule counts the steps."""
    schedule = optax.piecewise_constant_schedule(1.0, {k: 0.1 for k in range(1, 6)})
    optimizer = optax.sgd(schedule)
    batch = Tokens(jnp.asarray([[1.0], [10.0], [3.0], [30.0]]), jnp.ones((4, 1)))
    state = state_of(optimizer, pair(0, 0))
    state, metrics = step(optimizer, token_loss, state, batch, epochs=2, minibatches=2)
    rates = [1.0, 0.1, 0.01, 0.001]
    expected = -sum(r * g for r, g in zip(rates, [2, 20, 2, 20], strict=True))
    np.testing.assert_allclose(state.params.b, [expected], rtol=1e-5)
    assert int(state.step) == 1
    assert float(metrics["skipped"].weight) == 4.0
    np.testing.assert_allclose(metrics["grad_norm"].value, 11.0, rtol=1e-6)


def test_the_same_loss_key_never_serves_two_optimizer_steps():
    def loss(key, models: Pair, batch):
        noise = jr.uniform(key)
        return {"x": Mean(models.b[0], jnp.ones(()))}, {
            "sum": scalar_mean(noise),
            "squares": scalar_mean(noise**2),
        }

    state = state_of(optax.sgd(1.0), pair(0, 0))
    _, metrics = step(optax.sgd(1.0), loss, state, jnp.zeros((2, 1)), epochs=2, minibatches=2)
    spread = metrics["squares"].value - metrics["sum"].value ** 2
    assert float(spread) > 1e-3


def test_a_minibatch_that_does_not_divide_is_a_clear_error():
    state = state_of(optax.sgd(1.0), pair(0, 0))
    with pytest.raises(ValueError, match="batch of 10 rows is not divisible by minibatches 4; "):
        step(optax.sgd(1.0), token_loss, state, jnp.zeros((10, 1)), minibatches=4)


@pytest.mark.parametrize("name", ["epochs", "minibatches", "microbatches"])
def test_counts_below_1_are_errors_when_the_factory_builds(name):
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"expected {name} ≥ 1, got 0"):
        make_update(optax.sgd(1.0), **options)


def test_nothing_to_train_is_an_error():
    none = lambda models: jax.tree.map(lambda _: False, models)  # noqa: E731
    with pytest.raises(ValueError, match="at least one trainable leaf, got none"):
        state_of(optax.sgd(1.0), pair(0, 0), none)


def test_integers_do_not_train():
    with pytest.raises(ValueError, match="trainable leaves to be float arrays, got n"):
        state_of(optax.sgd(1.0), {"n": jnp.ones(2, jnp.int32)}, lambda m: {"n": True})


def test_init_copies_what_trains_and_shares_the_rest():
    models = pair(1, 2)
    state = state_of(optax.sgd(1.0), models, only_b)
    assert state.frozen.a is models.a
    assert state.params.b is not models.b
    assert state.params.b.unsafe_buffer_pointer() != models.b.unsafe_buffer_pointer()


def test_no_two_leaves_of_a_state_share_a_buffer():
    """An optimizer that starts from the parameters themselves must not alias what is donated."""
    optimizer = optax.contrib.schedule_free_sgd(0.1)
    state = state_of(optimizer, Pair(jnp.ones(1), jnp.ones(1, jnp.bfloat16)))
    leaves = jax.tree.leaves((state.params, state.opt_state))
    places = [x.unsafe_buffer_pointer() for x in leaves]
    assert len(set(places)) == len(places)


def test_after_runs_once_with_the_new_state_and_the_metrics():
    def after(key, state: TrainState, metrics):
        extra = {"beta": state.extra["beta"] * 2, "loss": metrics["loss"].value}
        return dataclasses.replace(state, extra=extra)

    init = make_init(
        optax.sgd(1.0),
        trainable=everything,
        extra=lambda models: {"beta": jnp.asarray(0.5), "loss": jnp.zeros(())},
    )
    state = init(jr.key(0), pair(0, 1))
    state, _ = step(optax.sgd(1.0), token_loss, state, THREE, after=after, epochs=3, microbatches=2)
    assert float(state.extra["beta"]) == 1.0
    np.testing.assert_allclose(state.extra["loss"], 2.5 * (1 - 1.5 - 4) / 3, rtol=1e-5)
    assert int(state.step) == 1


def test_after_may_move_frozen_leaves():
    """A teacher that follows its student, half of the way each step."""

    def after(key, state: TrainState, metrics):
        teacher = 0.5 * state.frozen.a + 0.5 * state.params.b
        return dataclasses.replace(state, frozen=Pair(teacher, None))

    state = state_of(optax.sgd(1.0), pair(4, 2), only_b)
    state, _ = step(optax.sgd(1.0), constant_gradients(0, 2), state, ONE_ROW, after=after)
    np.testing.assert_allclose(state.models.a, [2.0])
    np.testing.assert_allclose(state.models.b, [0.0])


def test_parts_are_the_four_in_order_and_any_may_be_replaced():
    algorithm = Algorithm(
        make_init(optax.sgd(1.0), trainable=everything),
        lambda key, state, data: (data, {}),
        token_loss,
        make_update(optax.sgd(1.0)),
    )
    init, rollout, loss, update = algorithm.parts()
    assert (init, rollout, loss, update) == (
        algorithm.init,
        algorithm.rollout,
        algorithm.loss,
        algorithm.update,
    )
    other = dataclasses.replace(algorithm, loss=constant_gradients(1, 1))
    assert other.loss is not loss and other.update is update


def test_metrics_of_the_same_name_are_added_up():
    both = combine_metrics({"x": scalar_mean(1.0), "y": scalar_mean(5.0)}, {"x": scalar_mean(3.0)})
    assert {k: float(m.value) for k, m in both.items()} == {"x": 2.0, "y": 5.0}
