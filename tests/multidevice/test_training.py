"""Algorithms on eight devices are the algorithms on one: the same samples, losses and moments, in
pieces.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float, PyTree

from purepost import Algorithm, Rows, TrainState, train
from purepost.algorithm import accumulate_gradient
from purepost.algorithms.grpo import grpo
from purepost.algorithms.sft import sft
from purepost.mean import Metrics
from purepost.models import Decoder
from purepost.models.containers import with_reference
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, Prompts
from purepost.sharding import (
    DATA_PARALLEL,
    FSDP,
    TENSOR_PARALLEL,
    Rules,
    make_mesh,
    place_batch,
    sharded,
)
from purepost.tree import named_leaves
from purepost.types import LanguageModel, causal_rows
from purepost.weights import add_lora

pytestmark = pytest.mark.usefixtures("full_compilation")

B, T, STEPS = 48, 20, 2
LARGE = 1024  # numbers: no leaf of so many lies whole on a device
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def rows(step: int) -> Rows:
    """Random tokens in rows of different lengths."""
    k_tokens, k_lengths = jr.split(jr.fold_in(jr.key(7), step))
    tokens = jr.randint(k_tokens, (B, T), 0, 64)
    return causal_rows(tokens, jr.randint(k_lengths, (B,), 2, T + 1))


def tasks(step: int) -> Tasks:
    """Eight prompts of different lengths."""
    k_tokens, k_lengths = jr.split(jr.fold_in(jr.key(8), step))
    lengths = jr.randint(k_lengths, (8,), 1, 7)
    tokens = jnp.where(jnp.arange(6) < lengths[:, None], jr.randint(k_tokens, (8, 6), 0, 64), 0)
    return Tasks(Prompts(tokens, lengths, jnp.arange(8, dtype=jnp.int32)))


ROWS = [rows(step) for step in range(STEPS)]
TASKS = [tasks(step) for step in range(STEPS)]


def run(
    algorithm: Algorithm, models: PyTree, data: list[Any], programs: Callable[[], int]
) -> tuple[list[float], TrainState, list[int]]:
    """Every step's loss, the last state, and how many programs there were after each step."""
    losses, counts = [], []
    state = algorithm.init(jr.key(0), models)
    for _, moved, metrics in train(
        algorithm, state, lambda step: data[step], key=jr.key(1), steps=STEPS
    ):
        state = moved
        losses.append(metrics["loss"])
        counts.append(programs())
    return [float(m.value) for m in losses], state, counts


def adam(state: TrainState) -> Any:
    """Adam's state in the optimizer's."""
    return state.opt_state.inner[1][0]


def check_moments(state: TrainState, expected: TrainState) -> None:
    """The gradients' mean is that of one device, and lies as its parameters lie."""
    for (name, x), (_, y) in zip(
        named_leaves(adam(state).mu), named_leaves(adam(expected).mu), strict=True
    ):
        largest = float(jnp.abs(y).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest, err_msg=name)
    for moments in (adam(state).mu, adam(state).nu):
        for (name, x), (_, y) in zip(
            named_leaves(moments), named_leaves(state.params), strict=True
        ):
            assert x.sharding == y.sharding, name


def check_pieces(state: TrainState) -> None:
    """Nothing large lies whole on every device."""
    for name, x in named_leaves((state.params, state.frozen, state.opt_state)):
        whole = x.sharding.is_fully_replicated
        assert not whole or x.size < LARGE, f"{name} {x.shape} is replicated"


@pytest.fixture(scope="module")
def one(model: Decoder) -> tuple[list[float], TrainState, list[int]]:
    return run(sft(OPTIMIZER), model, ROWS, lambda: 0)


@pytest.mark.parametrize(
    ("sizes", "rules", "microbatches"),
    [
        ((8, 1, 1), DATA_PARALLEL, 3),
        ((1, 8, 1), FSDP, 1),
        ((2, 2, 2), TENSOR_PARALLEL, 1),
    ],
    ids=["data", "fsdp", "data-fsdp-tensor"],
)
def test_sft_on_a_mesh(
    sizes: tuple[int, int, int],
    rules: Rules,
    microbatches: int,
    model: Decoder,
    one: tuple[list[float], TrainState, list[int]],
    programs: Callable[[], int],
) -> None:
    data, fsdp, tensor = sizes
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    algorithm = sharded(sft(OPTIMIZER, microbatches=microbatches), mesh, rules)
    losses, state, counts = run(algorithm, model, ROWS, programs)
    np.testing.assert_allclose(losses, one[0], rtol=1e-6)
    assert len(set(counts)) == 1, "a later step compiled again"
    check_moments(state, one[1])
    if rules is not DATA_PARALLEL:
        check_pieces(state)


def small_ids(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
    """The fraction of the sampled tokens below 16."""
    hits = completions.mask & (completions.tokens < 16)
    return hits.sum(-1, dtype=jnp.float32) / completions.lengths.astype(jnp.float32), {}


def test_grpo_with_adapters_on_a_mesh(model: Decoder, programs: Callable[[], int]) -> None:
    collect = single_turn(small_ids, Sampling(8, stop_ids=(3,)), group=4)
    algorithm = grpo(OPTIMIZER, collect, beta=0.1)
    models = with_reference(add_lora(model, rank=4, key=jr.key(2)))
    losses, expected, _ = run(algorithm, models, TASKS, programs)

    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    on_mesh = sharded(algorithm, mesh, TENSOR_PARALLEL)
    found, state, counts = run(on_mesh, models, TASKS, programs)
    # Advantages of size 1 that cancel: the loss is 0 at first, to their rounding.
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-6)
    assert len(set(counts)) == 1
    check_moments(state, expected)
    check_pieces(state)

    alone, _ = algorithm.rollout(jr.key(3), expected, TASKS[0])
    whole = sharded(algorithm, mesh, TENSOR_PARALLEL, rollout_rules=DATA_PARALLEL)
    over_rows = place_batch(alone.rows.tokens, mesh).sharding
    for some in (on_mesh, whole):
        shared, _ = some.rollout(jr.key(3), state, TASKS[0])
        assert np.array_equal(shared.rows.tokens, alone.rows.tokens)
        assert shared.rows.tokens.sharding == over_rows


def test_a_device_computes_its_part_of_the_batch(model: Decoder) -> None:
    single = sft(OPTIMIZER)

    def compiled(algorithm: Algorithm, batch: Rows) -> jax.stages.Compiled:
        state: TrainState[LanguageModel] = algorithm.init(jr.key(0), model)

        def gradient(params: LanguageModel, batch: Rows):
            return accumulate_gradient(
                algorithm.loss, jr.key(1), params, state.frozen, batch, microbatches=3
            )

        return jax.jit(gradient).lower(state.params, batch).compile()

    alone = compiled(single, ROWS[0])
    for mesh, rules in ((make_mesh(data=8), DATA_PARALLEL), (make_mesh(fsdp=8), FSDP)):
        shared = compiled(sharded(single, mesh, rules), place_batch(ROWS[0], mesh))
        assert flops(shared) < flops(alone) / 8 * 1.1
        # A device gathers the weights, and a chunk's hidden states for its part of the
        # vocabulary; never the hidden states of all rows.
        text = shared.as_text()
        assert text is not None
        assert gathered(text) < B // 3 * T * model.config.hidden_size


def flops(compiled: jax.stages.Compiled) -> float:
    """Floating point operations of one device."""
    cost = compiled.cost_analysis()
    assert cost is not None
    return cost["flops"]


def gathered(program: str) -> int:
    """The most numbers that any operation gathers or exchanges, in one array."""
    moves = re.findall(r" = (.*?) (?:all-gather|all-to-all)(?:-start)?\(", program)
    shapes = [shape for move in moves for shape in re.findall(r"\w+\[([\d,]+)\]", move)]
    return max((int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes), default=0)
