"""Rows that are forests give what plain rows give: shared prompts, packing, padding, batches."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import PRNGKeyArray

from purepost.models import Config, Decoder
from purepost.models.decoder import Unembed
from purepost.rollout.score import Scores, score
from purepost.types import Rows, causal_rows, check_rows, group_rows
from purepost.weights import add_lora

PROMPTS, GROUP, TIME = [3, 5], 3, 4  # lengths of the prompts, branches, tokens of a branch
BRANCHES = [[4, 1, 3], [2, 4, 0]]


def integers(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def as_scores(rows: Rows, weights: jax.Array) -> Scores:
    """Weights in the place of scores."""
    return Scores(weights, jnp.where(rows.mask, weights * weights, 0.0))


@eqx.filter_jit
def forward(model: Decoder, rows: Rows, weights: jax.Array) -> tuple[jax.Array, Scores, Decoder]:
    """Hidden states, scores, and the gradient of their sum weighted token by token."""

    def loss(model: Decoder) -> tuple[jax.Array, Scores]:
        scores, w = score(model, rows), as_scores(rows, weights)
        return (scores.logps * w.logps + scores.entropies * w.entropies).sum(), scores

    grads, scores = eqx.filter_grad(loss, has_aux=True)(model)
    return model(rows)[0], scores, grads


def assert_same_gradient(got: Decoder, want: Decoder, rel: float = 1e-5) -> None:
    """Every leaf, relative to its norm."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= rel * np.linalg.norm(b)


def at(x: jax.Array, row: int, indices: Any) -> np.ndarray:
    return np.asarray(x)[row, np.asarray(indices)]


class Shared:
    """Two groups of three branches in two rows, and the same as six plain rows."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        prompts = rng.integers(0, 19, (2, max(PROMPTS)))
        branches = rng.integers(0, 19, (2, GROUP, TIME))
        mask = np.ones((2, GROUP, TIME), bool)
        mask[0, 0, 1] = False  # a token that the policy did not sample
        self.weights = rng.normal(size=(2, GROUP, TIME)).astype(np.float32)
        self.shared = group_rows(
            integers(prompts),
            integers(PROMPTS),
            integers(branches),
            integers(BRANCHES),
            jnp.asarray(mask),
        )
        tokens = np.zeros((2, GROUP, max(PROMPTS) + TIME), np.int32)
        trained = np.zeros(tokens.shape, bool)
        self.apart_weights = np.zeros(tokens.shape, np.float32)
        for p, start in enumerate(PROMPTS):
            tokens[p, :, :start] = prompts[p, :start]
            tokens[p, :, start : start + TIME] = branches[p]
            trained[p, :, start : start + TIME] = mask[p]
            self.apart_weights[p, :, start : start + TIME] = self.weights[p]
        lengths = np.array(PROMPTS)[:, None] + BRANCHES
        flat = lambda x: jnp.asarray(x.reshape(6, *x.shape[2:]))  # noqa: E731
        self.apart = causal_rows(flat(tokens), integers(lengths.reshape(6)), flat(trained))
        self.shared_weights = np.zeros(self.shared.tokens.shape, np.float32)
        self.shared_weights[:, max(PROMPTS) :] = self.weights.reshape(2, -1)


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


def test_a_shared_prompt_gives_what_separate_rows_give(model: Decoder, shared: Shared) -> None:
    check_rows(shared.shared)
    check_rows(shared.apart)
    weights = jnp.asarray(shared.shared_weights)
    hidden, scores, grads = forward(model, shared.shared, weights)
    apart_weights = jnp.asarray(shared.apart_weights.reshape(6, -1))
    want_hidden, want_scores, want_grads = forward(model, shared.apart, apart_weights)
    width = max(PROMPTS)
    for p, start in enumerate(PROMPTS):
        for g, length in enumerate(BRANCHES[p]):
            here = width + TIME * g + np.arange(length)
            there = start + np.arange(length)
            row = GROUP * p + g
            for x, y in (
                (hidden, want_hidden),
                (scores.logps, want_scores.logps),
                (scores.entropies, want_scores.entropies),
            ):
                np.testing.assert_allclose(at(x, p, here), at(y, row, there), rtol=1e-5, atol=1e-5)
            trunk = np.arange(start)
            want = at(want_hidden, row, trunk)
            np.testing.assert_allclose(at(hidden, p, trunk), want, rtol=1e-5, atol=1e-5)
    assert int(shared.shared.mask.sum()) == int(shared.apart.mask.sum()) == 13
    np.testing.assert_allclose(scores.logps.sum(), want_scores.logps.sum(), rtol=1e-5)
    assert_same_gradient(grads, want_grads)


def padded(values: list[Any], fill: list[Any]) -> list[Any]:
    return values + fill[len(values) :]


def packed() -> Rows:
    """Documents of 5 and 4 tokens in one row of 17."""
    t = 17
    index = list(range(t))
    mask = [False, True, True, True, True, False, True, True, True]
    columns = (
        padded([1, 2, 3, 4, 5, 6, 7, 8, 9], [0] * t),
        padded([5] * 5 + [9] * 4, [i + 1 for i in index]),
        padded([0, 1, 2, 3, 4, 0, 1, 2, 3], [0] * t),
        padded([0, 0, 1, 2, 3, 5, 5, 6, 7], index),
        padded([0] * 5 + [1] * 4, [0] * t),
    )
    tokens, end, positions, parent, episode = (integers([x]) for x in columns)
    trained = jnp.asarray([padded(mask, [False] * t)])
    ids = integers([0])
    return Rows(tokens, end, positions, parent, trained, episode, ids, capacity=12, episodes=3)


def test_packed_documents_give_what_separate_rows_give(model: Decoder) -> None:
    rows = packed()
    check_rows(rows)
    weights = np.random.default_rng(0).normal(size=(1, 17)).astype(np.float32)
    hidden, scores, grads = forward(model, rows, jnp.asarray(weights))
    tokens, split = np.zeros((6, 9), np.int32), np.zeros((6, 9), np.float32)
    tokens[:2, :5] = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    split[0, :5], split[1, :4] = weights[0, :5], weights[0, 5:9]
    apart = causal_rows(integers(tokens), integers([5, 4, 0, 0, 0, 0]), jnp.ones((6, 9), bool))
    want_hidden, want_scores, want_grads = forward(model, apart, jnp.asarray(split))
    for row, (start, length) in enumerate([(0, 5), (5, 4)]):
        here, there = slice(start, start + length), slice(0, length)
        for x, y in ((hidden, want_hidden), (scores.logps, want_scores.logps)):
            np.testing.assert_allclose(x[0, here], y[row, there], rtol=1e-5, atol=1e-5)
    assert float(scores.logps[0, 5]) == 0.0  # the second document's first token is a root
    assert_same_gradient(grads, want_grads)


def test_what_padding_holds_changes_nothing(model: Decoder, shared: Shared) -> None:
    """Ids, weights and even NaN at slots that are not trained: the same bits."""
    rows = shared.shared
    real = np.asarray(rows.end) > np.arange(rows.end.shape[1]) + 1
    real |= np.asarray(rows.mask) | (np.asarray(rows.parent) != np.arange(rows.end.shape[1]))
    assert not real.all()
    other = jnp.asarray(np.where(real, rows.tokens, 18 - np.asarray(rows.tokens)))
    weights = jnp.asarray(shared.shared_weights)
    hidden, scores, grads = forward(model, rows, weights)
    changed = eqx.tree_at(lambda r: r.tokens, rows, other)
    again, same_scores, same_grads = forward(model, changed, weights)
    np.testing.assert_array_equal(np.asarray(hidden)[real], np.asarray(again)[real])
    for a, b in zip(
        jax.tree.leaves((scores, grads)), jax.tree.leaves((same_scores, same_grads)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_row_of_zeros_is_finite_and_trains_nothing(model: Decoder, shared: Shared) -> None:
    zeros = jax.tree.map(jnp.zeros_like, shared.shared)
    check_rows(zeros)
    hidden, scores, grads = forward(model, zeros, jnp.ones(zeros.tokens.shape))
    assert np.isfinite(hidden).all()
    for x in jax.tree.leaves((scores, grads)):
        np.testing.assert_array_equal(x, np.zeros(x.shape))


def test_a_row_is_the_same_alone_as_in_a_batch(model: Decoder, shared: Shared) -> None:
    rows = shared.shared
    weights = jnp.asarray(shared.shared_weights)
    hidden, scores, grads = forward(model, rows, weights)
    parts = []
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], rows)
        alone_hidden, alone, part = forward(model, one, weights[i : i + 1])
        np.testing.assert_allclose(alone_hidden[0], hidden[i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(alone.logps[0], scores.logps[i], rtol=1e-5, atol=1e-5)
        parts.append(part)
    assert_same_gradient(jax.tree.map(jnp.add, *parts), grads)


@eqx.filter_jit
def dropped(model: Decoder, rows: Rows, key: PRNGKeyArray | None) -> jax.Array:
    return model(rows, key=key)[0]


def test_dropout_belongs_to_a_rows_id(model: Decoder) -> None:
    """Three equal rows: equal ids drop equally, wherever they stand; no key drops nothing."""
    adapted = add_lora(model, rank=2, key=jr.key(1), dropout=0.5)
    bs = lambda m: [w.b for w in (m.layers.attention.q, m.layers.mlp.down)]  # noqa: E731
    noise = np.random.default_rng(0)
    adapted = eqx.tree_at(
        bs, adapted, [jnp.asarray(noise.normal(size=b.shape), jnp.float32) for b in bs(adapted)]
    )

    def rows(ids: list[int]) -> Rows:
        tokens = jnp.tile(integers([[1, 2, 3, 4, 5, 6]]), (len(ids), 1))
        return causal_rows(tokens, jnp.full(len(ids), 6, jnp.int32), ids=integers(ids))

    first = np.asarray(dropped(adapted, rows([7, 8, 7]), jr.key(3)))
    np.testing.assert_allclose(first[0], first[2], atol=1e-6)
    assert np.abs(first[0] - first[1]).max() > 0.1
    moved = np.asarray(dropped(adapted, rows([8, 7, 9]), jr.key(3)))
    np.testing.assert_allclose(moved[:2], first[[1, 0]], atol=1e-6)
    assert np.abs(np.asarray(dropped(adapted, rows([7, 8, 7]), jr.key(4))) - first).max() > 0.1
    whole = np.asarray(dropped(adapted, rows([7, 8, 7]), None))
    np.testing.assert_allclose(whole[0], whole[1], atol=1e-6)
    assert np.abs(whole[0] - first[0]).max() > 0.1


class Looked(eqx.Module):
    """The least of language models: a token's hidden state is its embedding."""

    embed: jax.Array

    def __call__(self, rows: Rows, *, key: PRNGKeyArray | None = None) -> tuple[jax.Array, None]:
        return self.embed[rows.tokens], None

    @property
    def unembed(self) -> Unembed:
        return Unembed(self.embed, True)


def test_tied_embeddings_get_both_gradients() -> None:
    """E = [[1],[2]], token 0 before token 1: logits E·E₀ = [1, 2], loss ln(e + e²) − 2."""
    model = Looked(jnp.asarray([[1.0], [2.0]]))
    rows = causal_rows(integers([[0, 1]]), integers([2]))
    gradient = eqx.filter_value_and_grad(lambda m: -score(m, rows).logps.sum())
    loss, grads = eqx.filter_jit(gradient)(model)
    assert float(loss) == pytest.approx(0.313262, abs=1e-6)
    np.testing.assert_allclose(grads.embed, [[0.0], [-0.268941]], atol=1e-6)
    stepped = model.embed - grads.embed
    np.testing.assert_allclose(stepped, [[1.0], [2.268941]], atol=1e-6)


def test_a_tied_decoder_reads_its_embeddings_and_an_untied_one_its_head(model: Decoder) -> None:
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 10)), jnp.float32)
    want = np.asarray(hidden) @ np.asarray(model.embed).T
    np.testing.assert_allclose(model.unembed(hidden), want, rtol=1e-5, atol=1e-5)
    head = jnp.asarray(np.random.default_rng(1).normal(size=(10, 19)), jnp.bfloat16)
    untied = eqx.tree_at(lambda m: m.head, model, head, is_leaf=lambda x: x is None)
    logits = untied.unembed(hidden.astype(jnp.bfloat16))
    assert logits.dtype == jnp.float32
    want = np.asarray(hidden) @ np.asarray(head.astype(jnp.float32))
    np.testing.assert_allclose(logits, want, rtol=0.02, atol=0.05)


def test_impossible_shapes_are_errors() -> None:
    with pytest.raises(ValueError, match="num_kv_heads to divide num_heads 3, got 2"):
        Config(19, 10, 14, 2, 3, 2, 6)
    with pytest.raises(ValueError, match="even head_dim for rotary positions, got 5"):
        Config(19, 10, 14, 2, 4, 2, 5)
