"""Student against teacher, a chunk at a time, equals the comparison of whole logits."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.losses.distillation import forward_kl, reverse_kl
from purepost.models import Decoder, init_decoder
from purepost.rollout.divergence import compare
from purepost.types import Rows, causal_rows, group_rows


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
    """Forward KL and log-probabilities from whole logits."""

    def logits(m: Decoder) -> jax.Array:
        hidden = jnp.take_along_axis(m(rows)[0], rows.parent[..., None], 1)
        return m.unembed(hidden)

    z, w = logits(student), logits(teacher)
    s, t = jax.nn.log_softmax(z / temperature), jax.nn.log_softmax(w / temperature)
    far = (jnp.exp(t) * (t - s)).sum(-1)
    own = jnp.take_along_axis(jax.nn.log_softmax(z), rows.tokens[..., None], -1)[..., 0]
    return jnp.where(rows.mask, far, 0.0), jnp.where(rows.mask, own, 0.0)


@pytest.mark.parametrize("chunk", [2, 6, 64])
def test_value_and_gradient_of_whole_logits(
    model: Decoder, teacher: Decoder, rows: Rows, chunk: int
) -> None:
    def chunked(s: Decoder) -> tuple:
        found = compare(s, teacher, rows, forward_kl, temperature=2.0, chunk=chunk)
        return (found.divergences - 0.3 * found.logps).sum(), found

    def plain(s: Decoder) -> tuple:
        far, own = whole(s, teacher, rows, 2.0)
        return (far - 0.3 * own).sum(), (far, own)

    (_, found), got = eqx.filter_jit(eqx.filter_value_and_grad(chunked, has_aux=True))(model)
    (_, wanted), want = eqx.filter_jit(eqx.filter_value_and_grad(plain, has_aux=True))(model)
    np.testing.assert_allclose(found.divergences, wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.logps, wanted[1], rtol=1e-5, atol=1e-5)
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
