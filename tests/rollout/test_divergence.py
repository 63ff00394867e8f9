"""Student against teacher, a chunk at a time, equals the comparison of whole logits."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.losses.distillation import (
    among_top,
    forward_kl,
    jensen_shannon,
    reverse_kl,
)
from purepost.models import Decoder, init_decoder
from purepost.models.decoder import Unembed
from purepost.rollout.divergence import compare
from purepost.types import KeyArray, Rows, causal_rows, group_rows

pytestmark = pytest.mark.usefixtures("full_compilation")


@pytest.fixture(scope="module")
def teacher(model: Decoder) -> Decoder:
    return jax.tree.map(lambda x: 0.8 * x + 0.05, model)


@pytest.fixture(scope="module")
def rows() -> Rows:
    rng = np.random.default_rng(0)
    tokens = lambda *shape: jnp.asarray(rng.integers(0, 19, shape), jnp.int32)  # noqa: E731
    lengths = jnp.asarray([[4, 2], [1, 3]], jnp.int32)
    mask = jnp.arange(4) < lengths[..., None]
    return group_rows(tokens(2, 3), jnp.asarray([3, 2], jnp.int32), tokens(2, 2, 4), lengths, mask)


def whole(student: Decoder, teacher: Decoder, rows: Rows, temperature: float) -> tuple:
    """Forward KL, log-probabilities and entropies from whole logits."""

    def logits(m: Decoder) -> jax.Array:
        hidden = jnp.take_along_axis(m(rows)[0], rows.parent[..., None], 1)
        return m.unembed(hidden)

    z, w = logits(student), logits(teacher)
    s, t = jax.nn.log_softmax(z / temperature), jax.nn.log_softmax(w / temperature)
    far = (jnp.exp(t) * (t - s)).sum(-1)
    own = jnp.take_along_axis(jax.nn.log_softmax(z), rows.tokens[..., None], -1)[..., 0]
    entropies = -(jnp.exp(s) * s).sum(-1)
    return tuple(jnp.where(rows.mask, x, 0.0) for x in (far, own, entropies))


@pytest.mark.parametrize("chunk", [2, 6, 64])
def test_value_and_gradient_of_whole_logits(
    model: Decoder, teacher: Decoder, rows: Rows, chunk: int
) -> None:
    def chunked(s: Decoder) -> tuple:
        found = compare(s, teacher, rows, forward_kl, temperature=2.0, chunk=chunk)
        return (found.divergences - 0.3 * found.logps + 0.2 * found.entropies).sum(), found

    def plain(s: Decoder) -> tuple:
        far, own, entropies = whole(s, teacher, rows, 2.0)
        return (far - 0.3 * own + 0.2 * entropies).sum(), (far, own, entropies)

    (_, found), got = eqx.filter_jit(eqx.filter_value_and_grad(chunked, has_aux=True))(model)
    (_, wanted), want = eqx.filter_jit(eqx.filter_value_and_grad(plain, has_aux=True))(model)
    np.testing.assert_allclose(found.divergences, wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.logps, wanted[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropies, wanted[2], rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_no_gradient_reaches_the_teacher(model: Decoder, teacher: Decoder, rows: Rows) -> None:
    value = lambda t: compare(model, t, rows, reverse_kl).divergences.sum()  # noqa: E731
    grads = eqx.filter_jit(eqx.filter_grad(value))(teacher)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_a_teacher_may_read_another_prompt(model: Decoder, teacher: Decoder) -> None:
    """The same two completion tokens behind [1, 2] and behind [5, 6, 7, 8]."""
    short = jnp.asarray([[1, 2, 3, 4]], jnp.int32)
    long = jnp.asarray([[5, 6, 7, 8, 3, 4]], jnp.int32)

    def of(tokens: jax.Array, trained: int) -> Rows:
        index = jnp.arange(tokens.shape[1])[None]
        return causal_rows(tokens, jnp.asarray([tokens.shape[1]]), index >= trained, capacity=2)

    found = compare(model, teacher, of(short, 2), forward_kl, teacher_rows=of(long, 4))
    s = jax.nn.log_softmax(model.unembed(model(of(short, 2))[0][0, 1:3]))
    t = jax.nn.log_softmax(teacher.unembed(teacher(of(long, 4))[0][0, 3:5]))
    np.testing.assert_allclose(found.divergences[0, 2:], forward_kl(t, s), rtol=1e-4, atol=1e-6)
    assert not np.asarray(found.divergences[0, :2]).any()


def test_vocabularies_of_two_sizes_are_an_error(model: Decoder, rows: Rows) -> None:
    other = init_decoder(jr.key(0), replace(model.config, vocab_size=23))
    with pytest.raises(ValueError, match="student's 19 tokens, got 23"):
        compare(model, other, rows, forward_kl)


class Looked(eqx.Module):
    """A token's hidden state is given; only the head is at stake."""

    hidden: jax.Array
    unembed: Unembed

    def __call__(self, rows: Rows, *, key: KeyArray | None = None) -> tuple[jax.Array, None]:
        return self.hidden, None


def test_a_bf16_heads_gradient_is_summed_in_float32() -> None:
    """1024 equal summands of 1/512, a chunk each: bf16 would stop growing at 1/2."""
    n = 1024
    line = causal_rows(jnp.zeros((1, n + 1), jnp.int32), jnp.full(1, n + 1, jnp.int32))
    head = Unembed(jnp.zeros((2, 1), jnp.bfloat16), True)
    model = Looked(jnp.full((1, n + 1, 1), 1 / 256, jnp.bfloat16), head)
    sure = Looked(jnp.ones((1, n + 1, 1)), Unembed(jnp.asarray([[30.0], [0.0]]), True))
    value = lambda m: compare(m, sure, line, forward_kl, chunk=1).divergences.sum()  # noqa: E731
    grads = eqx.filter_jit(eqx.filter_grad(value))(model)
    assert grads.unembed.weight.dtype == jnp.bfloat16
    got = grads.unembed.weight.astype(jnp.float32)
    np.testing.assert_allclose(got, [[-2.0], [2.0]], rtol=1e-2)


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """Forward and backward of 152k × 8k logits of each, 5 GB, in that of a few chunks: 8 sets of
    logits and the head's gradient. Twice the tokens need no more but their hidden states'.
    """
    v, d, chunk = 151_936, 16, 256

    def temporary(t: int) -> int:
        def loss(own: tuple[jax.Array, ...], other: tuple[jax.Array, ...], rows: Rows) -> Any:
            student, teacher = (Looked(h, Unembed(w, True)) for h, w in (own, other))
            far = among_top(50, jensen_shannon(0.5))
            found = compare(student, teacher, rows, far, temperature=2.0, chunk=chunk)
            return (found.divergences - 0.1 * found.logps).sum()

        tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
        line = jax.eval_shape(causal_rows, tokens, jax.ShapeDtypeStruct((1,), jnp.int32))
        model = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, t, d), (v, d)))
        analysis = jax.jit(jax.grad(loss)).lower(model, model, line).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporary(4096), temporary(8192)
    assert large < 4 * (8 * chunk * v + v * d)
    assert large - small < 4096 * 4 * (4 * d + 16)
