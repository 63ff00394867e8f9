"""Combined algorithms: the sum of their losses, over views of larger models."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import distillations, tiny
from experiments.probes.sampled import COLLECT, tasks
from experiments.probes.supervised import forked
from purepost import TrainState, train
from purepost.algorithm import accumulate_gradient
from purepost.algorithms import grpo, logit_distillation, ppo, self_distillation, sft
from purepost.combine import Part, combine, over
from purepost.models import WithReference
from purepost.models.containers import Distill
from purepost.models.critic import actor_critic
from purepost.models.decoder import Decoder
from purepost.types import num_rows
from tests.compare import assert_close, assert_same_bits

ADAM = optax.adam(0.01)


def student(models: Distill[Decoder]) -> Decoder:
    return models.student


@pytest.fixture(scope="module")
def models() -> Distill[Decoder]:
    return distillations.with_teacher(tiny(lora=False))


TWO = (
    Part("far", logit_distillation(ADAM, alpha=0.75), weight=2.0),
    Part("told", over(student, sft(ADAM)), weight=0.5),
)


def gradient(
    algorithm: Any, models: Distill[Decoder], batch: Any, microbatches: int = 1
) -> tuple[dict, Any]:
    """(values of the terms, gradient) with respect to the student."""
    state = algorithm.init(jr.key(0), models)
    terms, _, grads = eqx.filter_jit(accumulate_gradient)(
        algorithm.loss, jr.key(1), state.params, state.frozen, batch, microbatches
    )
    return {name: float(mean.value) for name, mean in terms.items()}, grads


def test_the_loss_is_the_weighted_sum(models: Distill[Decoder]) -> None:
    """Terms and gradient, of eight rows beside four, whole and in three micro-batches."""
    algorithm = combine(*TWO)
    data = distillations.rows(0)(0), forked(0)(0)
    state = algorithm.init(jr.key(0), models)
    batch, _ = algorithm.rollout(jr.key(2), state, data)
    assert [num_rows(part) for part in data] == [8, 4]
    assert [num_rows(part) for part in batch] == [8, 8]
    alone = [gradient(part.algorithm, models, own) for part, own in zip(TWO, data, strict=True)]
    want = jax.tree.map(lambda a, b: 2.0 * a + 0.5 * b, alone[0][1], alone[1][1])
    for microbatches in (1, 3):
        values, grads = gradient(algorithm, models, batch, microbatches)
        assert_close(grads, want)
        assert values == pytest.approx(
            {f"far/{name}": 2.0 * value for name, value in alone[0][0].items()}
            | {f"told/{name}": 0.5 * value for name, value in alone[1][0].items()},
            rel=1e-5,
        )


def test_three_parts_and_their_metrics(models: Distill[Decoder]) -> None:
    """RL, distillation and SFT of one student in one step; a weight may be a traced array."""

    def steps(weight: jax.Array) -> TrainState:
        algorithm = combine(
            *TWO, Part("rl", over(distillations.learner, grpo(ADAM, COLLECT)), weight=weight)
        )
        state = algorithm.init(jr.key(0), models)
        batch, metrics = algorithm.rollout(
            jr.key(2), state, (distillations.rows(0)(0), forked(0)(0), tasks(0)(0))
        )
        assert "rl/reward" in metrics
        state, metrics = algorithm.update(algorithm.loss, jr.key(1), state, batch)
        assert {"loss/far/divergence", "loss/rl/policy", "told/entropy"} <= metrics.keys()
        return state

    without, moved = (eqx.filter_jit(steps)(jnp.float32(w)) for w in (0.0, 1.0))
    assert_same_bits(without.frozen, moved.frozen)
    assert not np.array_equal(without.params.student.embed, moved.params.student.embed)


def test_over_a_view_is_the_algorithm_itself(models: Distill[Decoder]) -> None:
    """To the bit, its optimizer's state included; the rest is frozen."""
    plain, wide = sft(ADAM), over(student, sft(ADAM))
    before = plain.init(jr.key(0), models.student), wide.init(jr.key(0), models)
    assert not jax.tree.leaves(before[1].params.teacher)
    _, one, _ = list(train(plain, before[0], forked(0), key=jr.key(1), steps=2))[-1]
    _, two, _ = list(train(wide, before[1], forked(0), key=jr.key(1), steps=2))[-1]
    assert_same_bits(one.params, two.params.student)
    assert_same_bits(one.opt_state, two.opt_state)
    assert_same_bits(two.frozen.teacher, models.teacher)
    assert_same_bits(two.models.teacher, models.teacher)


def test_a_view_may_arrange_and_leave_fields_empty(models: Distill[Decoder]) -> None:
    """GRPO without a reference, of the student of a pair; its state is of the pair."""
    algorithm = over(distillations.learner, grpo(ADAM, COLLECT))
    state = algorithm.init(jr.key(0), models)
    _, state, metrics = next(train(algorithm, state, tasks(0), key=jr.key(1), steps=1))
    assert float(metrics["skipped"].value) == 0
    assert jax.tree.structure(state.models) == jax.tree.structure(models)
    assert not np.array_equal(state.models.student.embed, models.student.embed)


def test_what_the_first_part_moves_after_a_step_moves() -> None:
    """A teacher that is an average, beside SFT."""
    model = tiny(lora=False)
    algorithm = combine(
        Part("self", self_distillation(ADAM, decay=0.5)),
        Part("told", over(student, sft(ADAM))),
    )
    state = algorithm.init(jr.key(0), Distill(model, model))
    data = lambda step: (distillations.views(0)(step), forked(0)(step))  # noqa: E731
    _, state, _ = next(train(algorithm, state, data, key=jr.key(1), steps=1))
    want = (state.models.student.embed + model.embed) / 2
    np.testing.assert_allclose(state.models.teacher.embed, want, rtol=1e-6, atol=1e-7)


def test_what_does_not_combine_is_an_error(models: Distill[Decoder]) -> None:
    one: Any = TWO[:1]
    with pytest.raises(ValueError, match="at least two parts"):
        combine(*one)
    with pytest.raises(ValueError, match="a name of its own"):
        combine(TWO[0], TWO[0])
    with pytest.raises(ValueError, match="0 ≤ weight"):
        replace(TWO[0], weight=-1.0)
    algorithm = combine(*TWO)
    state = algorithm.init(jr.key(0), models)
    data: Any = (forked(0)(0),)
    with pytest.raises(ValueError, match=r"data for each of \['far', 'told'\], got 1"):
        algorithm.rollout(jr.key(0), state, data)
    critic = actor_critic(WithReference(tiny(lora=False)))
    late = combine(
        Part("told", over(lambda m: m.policy, sft(ADAM))),
        Part("rl", ppo(ADAM, COLLECT, beta=0.1, target=1.0)),
    )
    with pytest.raises(ValueError, match="'rl' that does; put it first"):
        late.init(jr.key(0), critic)

    def doubled(models: Distill[Decoder]) -> Distill[Decoder]:
        return Distill(models.student, models.student)

    twice = over(doubled, logit_distillation(ADAM))
    with pytest.raises(ValueError, match="uses every leaf once"):
        twice.init(jr.key(0), models)
