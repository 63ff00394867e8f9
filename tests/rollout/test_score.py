"""Scores against log_softmax over all the logits at once: values, gradients, memory."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import PRNGKeyArray

from purepost.models.decoder import Unembed
from purepost.rollout.score import Scores, score
from purepost.rollout.trained import LOGITS, Trained, tokens_at_once
from purepost.types import Rows, causal_rows
from purepost.weights import add_lora

pytestmark = pytest.mark.usefixtures("full_compilation")

B, T, D, V = 2, 7, 5, 11
Head = Callable[[jax.Array], jax.Array]


class Looked(eqx.Module):
    """A token's hidden state is given; only the head is at stake."""

    hidden: jax.Array
    head: Head

    def __call__(self, rows: Rows, *, key: PRNGKeyArray | None = None) -> tuple[jax.Array, None]:
        return self.hidden, None

    @property
    def unembed(self) -> Head:
        return self.head


class Masked(eqx.Module):
    """A head that forbids some entries of the vocabulary."""

    weight: jax.Array
    allowed: jax.Array

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return jnp.where(self.allowed, hidden @ self.weight, -jnp.inf)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def heads() -> dict[str, Head]:
    untied = Unembed(normal(1, D, V), False)
    adapted = add_lora(untied, where="weight", rank=2, key=jr.key(0))
    adapted = eqx.tree_at(lambda u: u.weight.b, adapted, normal(2, 2, V))
    allowed = jnp.arange(V) != 3
    return {
        "tied": Unembed(normal(1, V, D), True),
        "untied": untied,
        "lora": adapted,
        "masked": Masked(normal(1, D, V), allowed),
    }


def rows(capacity: int | None = None) -> Rows:
    """Five and seven tokens; three and four of them are trained."""
    tokens = jnp.asarray([[1, 2, 0, 4, 5, 0, 0], [6, 7, 8, 9, 10, 0, 1]], jnp.int32)
    mask = [[False, True, True, False, True, True, True], [True, False, True, True, False, True, 1]]
    lengths = jnp.asarray([5, 7], jnp.int32)
    return causal_rows(tokens, lengths, jnp.asarray(mask, bool), capacity=capacity)


jitted = eqx.filter_jit(score)
WEIGHTS = Scores(normal(4, B, T), normal(5, B, T))
TEMPERATURE = jnp.asarray([0.5, 2.0])


def plain(model: Looked, temperature: jax.Array) -> Scores:
    """The textbook way, which holds all the logits."""
    r = rows()
    parent = jnp.take_along_axis(model.hidden, r.parent[..., None], 1)
    logps = jax.nn.log_softmax(model.head(parent) / temperature[:, None, None])
    p = jnp.exp(logps)
    entropies = -jnp.where(p > 0, p * jnp.where(p > 0, logps, 0.0), 0.0).sum(-1)
    logps = jnp.take_along_axis(logps, r.tokens[..., None], -1)[..., 0]
    return Scores(jnp.where(r.mask, logps, 0.0), jnp.where(r.mask, entropies, 0.0))


def weighted(scores: Scores) -> tuple[jax.Array, Scores]:
    total = (scores.logps * WEIGHTS.logps + scores.entropies * WEIGHTS.entropies).sum()
    return total, scores


def with_gradient(f: Callable[[Looked], Scores], model: Looked) -> tuple[Scores, Looked]:
    gradient = eqx.filter_grad(lambda m: weighted(f(m)), has_aux=True)
    grads, scores = eqx.filter_jit(gradient)(model)
    return scores, grads


def assert_same(got: Any, want: Any) -> None:
    """Every leaf to 1e-5 of its largest entry."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def scored(chunk: int = 256, capacity: int | None = None) -> Callable[[Looked], Scores]:
    return lambda m: score(m, rows(capacity), temperature=TEMPERATURE, chunk=chunk)


@pytest.mark.parametrize("name", ["tied", "untied", "lora", "masked"])
def test_values_and_gradients_are_those_of_log_softmax(name: str) -> None:
    """Of log-probabilities and entropies, to hidden states and every leaf of the head."""
    model = Looked(normal(0, B, T, D), heads()[name])
    assert_same(
        with_gradient(scored(), model), with_gradient(lambda m: plain(m, TEMPERATURE), model)
    )


def test_chunks_and_capacity_change_nothing() -> None:
    """Chunks that divide the row and that do not; as much room as is needed, and more."""
    model = Looked(normal(0, B, T, D), heads()["tied"])
    want = with_gradient(lambda m: plain(m, TEMPERATURE), model)
    for chunk, capacity in ((1, None), (6, None), (4, 4), (2, 5)):
        assert_same(with_gradient(scored(chunk, capacity), model), want)


def test_what_is_not_trained_scores_zero_and_gets_no_gradient() -> None:
    model = Looked(normal(0, B, T, D), heads()["untied"])
    scores, grads = with_gradient(scored(), model)
    mask = np.asarray(rows().mask)
    assert mask.sum() == 7
    assert not np.asarray(scores.logps)[~mask].any()
    assert not np.asarray(scores.entropies)[~mask].any()
    read = np.zeros((B, T), bool)  # the hidden states that a trained token is predicted from
    for b, t in zip(*np.nonzero(mask), strict=True):
        read[b, t - 1] = True
    assert np.asarray(grads.hidden)[read].all(-1).all()
    assert not np.asarray(grads.hidden)[~read].any()


def test_one_gradient_alone() -> None:
    """Of the entropies without the log-probabilities, of the head with the hidden states fixed."""
    model = Looked(normal(0, B, T, D), heads()["untied"])

    def entropy(f: Callable[[Looked], Scores]) -> Head:
        where = eqx.tree_at(lambda m: m.head.weight, jax.tree.map(lambda _: False, model), True)
        head, rest = eqx.partition(model, where)
        loss = lambda h: f(eqx.combine(h, rest)).entropies.sum()  # noqa: E731
        return eqx.filter_jit(eqx.filter_grad(loss))(head).head

    assert_same(entropy(scored()), entropy(lambda m: plain(m, TEMPERATURE)))


@pytest.mark.parametrize("name", ["tied", "lora", "masked"])
def test_a_frozen_heads_gradient(name: str) -> None:
    """To the hidden states alone: of log-probabilities, which is found with the logits, of
    entropies, and of both.
    """
    head, hidden = heads()[name], normal(0, B, T, D)

    def gradient(f: Callable[[Looked], Scores], both: bool, only: bool) -> jax.Array:
        def loss(hidden: jax.Array) -> jax.Array:
            scores = f(Looked(hidden, head))
            total = jnp.zeros(())
            if not only:
                total += (scores.logps * WEIGHTS.logps).sum()
            if both:
                total += (scores.entropies * WEIGHTS.entropies).sum()
            return total

        return jax.jit(jax.grad(loss))(hidden)

    for both, only in ((False, False), (True, False), (True, True)):
        want = gradient(lambda m: plain(m, TEMPERATURE), both, only)
        for chunk in (1, 4, 256):
            assert_same(gradient(scored(chunk), both, only), want)


def test_how_often_a_head_is_applied() -> None:
    """One that trains takes 8·d·v FLOPs a token: logits, again, and two gradients; 6 where all
    tokens fit in one chunk, whose logits are kept; 4 if frozen, which is never applied again.
    """
    t, d, v = 64, 256, 512

    def per_weight(frozen: bool, chunk: int | None) -> float:
        def loss(weight: jax.Array, hidden: jax.Array, rows: Rows) -> jax.Array:
            return score(Looked(hidden, Unembed(weight, True)), rows, chunk=chunk).logps.sum()

        line = causal_rows(jnp.zeros((1, t), jnp.int32), jnp.full(1, t, jnp.int32))
        step = jax.jit(jax.value_and_grad(loss, 1 if frozen else (0, 1)))
        compiled = step.lower(normal(0, v, d), normal(1, 1, t, d), line).compile()
        cost: Any = compiled.cost_analysis()
        return cost["flops"] / ((chunk or t) * d * v)  # the body of a loop counts once

    found = [per_weight(True, 32), per_weight(False, 32), per_weight(False, None)]
    assert found == pytest.approx([4, 8, 6], rel=0.1)


def test_a_frozen_heads_chunks_are_smaller() -> None:
    """The same gradient of the hidden states, in a third of the memory: 3 chunks of 200 tokens."""
    t, d, v = 301, 8, 2048
    line = causal_rows(jnp.zeros((2, t), jnp.int32), jnp.full(2, t, jnp.int32), capacity=t - 1)

    def found(arguments: tuple[int, ...]) -> tuple[jax.Array, int]:
        def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
            return (score(Looked(hidden, Unembed(weight, True)), line).logps ** 2).sum()

        inputs = normal(0, 2, t, d), normal(1, v, d)
        compiled = jax.jit(jax.grad(loss, arguments)).lower(*inputs).compile()
        analysis: Any = compiled.memory_analysis()
        return compiled(*inputs)[0], analysis.temp_size_in_bytes

    (frozen, small), (trained, large) = found((0,)), found((0, 1))
    assert_same(frozen, trained)
    assert small < large / 2


def test_chunks_are_of_like_size_and_bounded_by_their_logits() -> None:
    rows = causal_rows(jnp.zeros((4, 100), jnp.int32), jnp.full(4, 100, jnp.int32))
    for chunk, size, count in ((512, 100, 1), (256, 50, 2), (1, 1, 100)):
        trained = Trained.of(rows, chunk, capacity=100)
        assert trained.size == size and trained.capacity == size * count
    hidden = jnp.zeros((1, 1, 1))
    for vocabulary, tokens in ((49_152, 1024), (151_936, 256), (512, 131_072), (2**28, 1)):
        head = lambda h, v=vocabulary: jnp.zeros((*h.shape[:-1], v))  # noqa: E731
        assert tokens_at_once(head, hidden) == tokens
        assert tokens == 1 or tokens * vocabulary <= LOGITS < 2 * tokens * vocabulary


def test_temperature_is_the_rows_own() -> None:
    model = Looked(normal(0, B, T, D), heads()["tied"])
    default = jitted(model, rows())
    assert_same(default, eqx.filter_jit(plain)(model, jnp.ones(2)))
    both = jitted(model, rows(), temperature=jnp.asarray([1.0, 2.0]))
    np.testing.assert_array_equal(both.logps[0], default.logps[0])
    halved = eqx.filter_jit(plain)(model, jnp.full(2, 2.0))
    np.testing.assert_allclose(both.logps[1], halved.logps[1], rtol=1e-5)
    greedy = jitted(model, rows(), temperature=jnp.zeros(2))  # scored at 1, as it was sampled
    np.testing.assert_array_equal(greedy.logps, default.logps)


class Constant(eqx.Module):
    """A head whose logits are its parameters, whatever the hidden state."""

    logits: jax.Array

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.logits, (*hidden.shape[:-1], self.logits.size)) + 0.0


def test_a_forbidden_token_has_no_entropy_and_no_gradient() -> None:
    """Logits [0, −∞]: log π = 0 and H = 0, and both gradients are 0."""
    pair = causal_rows(jnp.zeros((1, 2), jnp.int32), jnp.asarray([2], jnp.int32))
    for pick in (lambda s: s.entropies, lambda s: s.logps):
        model = Looked(jnp.zeros((1, 2, 1)), Constant(jnp.asarray([0.0, -jnp.inf])))
        loss = lambda m, pick=pick: pick(score(m, pair)).sum()  # noqa: E731
        value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
        assert float(value) == 0.0
        np.testing.assert_array_equal(grads.head.logits, [0.0, 0.0])


def test_equal_logits_over_a_large_vocabulary() -> None:
    """−ln 151936, in float32, whatever the head's dtype."""
    pair = causal_rows(jnp.zeros((1, 2), jnp.int32), jnp.asarray([2], jnp.int32))
    head = Unembed(jnp.ones((151936, 1), jnp.bfloat16), True)
    scores = jitted(Looked(jnp.ones((1, 2, 1), jnp.bfloat16), head), pair)
    assert scores.logps.dtype == scores.entropies.dtype == jnp.float32
    assert float(scores.logps[0, 1]) == pytest.approx(-11.931215, rel=1e-6)
    assert float(scores.entropies[0, 1]) == pytest.approx(11.931215, rel=1e-5)


def test_a_bf16_heads_gradient_is_summed_in_float32() -> None:
    """1024 equal summands of 1/512, a chunk each: bf16 would stop growing at 1/2."""
    n = 1024
    line = causal_rows(jnp.zeros((1, n + 1), jnp.int32), jnp.full(1, n + 1, jnp.int32))
    head = Unembed(jnp.zeros((2, 1), jnp.bfloat16), True)
    model = Looked(jnp.full((1, n + 1, 1), 1 / 256, jnp.bfloat16), head)
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: score(m, line, chunk=1).logps.sum()))(model)
    assert grads.head.weight.dtype == jnp.bfloat16
    np.testing.assert_allclose(grads.head.weight.astype(jnp.float32), [[2.0], [-2.0]], rtol=1e-2)


@pytest.mark.parametrize("trained", [(0, 1), (0,)], ids=["head", "frozen head"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(trained: tuple[int, ...]) -> None:
    """Forward and backward of 152k × 8k logits, which would be 5 GB, in the memory of a gradient of
    the head and three chunks of logits; twice the tokens need no more but their hidden states'.
    """
    v, d, chunk = 151_936, 16, 256

    def temporary(t: int) -> int:
        def loss(hidden: jax.Array, weight: jax.Array, rows: Rows) -> jax.Array:
            scores = score(Looked(hidden, Unembed(weight, True)), rows, chunk=chunk)
            return (scores.logps + 0.1 * scores.entropies).sum()

        tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
        line = jax.eval_shape(causal_rows, tokens, jax.ShapeDtypeStruct((1,), jnp.int32))
        shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, t, d), (v, d)))
        compiled = jax.jit(jax.grad(loss, trained)).lower(*shapes, line).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporary(4096), temporary(8192)
    assert large < 4 * (3 * chunk * v + v * d)
    assert large - small < 4096 * 4 * (4 * d + 16)
