"""Norm and attention against their definitions in NumPy, float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.models import layers
from purepost.models.layers import attention, gelu, rms_norm, soft_cap
from purepost.types import Rows, causal_rows, check_rows

T, HEADS, KEY_HEADS, WIDTH = 11, 4, 2, 3


class Forest(NamedTuple):
    """Who is whose parent; −1 for a root. Everything else follows."""

    parents: list[int]

    def path(self, i: int) -> list[int]:
        """The token and its ancestors."""
        found = [i]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found

    def rows(self) -> Rows:
        t = len(self.parents)
        paths = [self.path(i) for i in range(t)]
        ends = [1 + max(i for i in range(t) if j in paths[i]) for j in range(t)]
        parents = [i if p < 0 else p for i, p in enumerate(self.parents)]
        integers = (range(1, t + 1), ends, [len(p) - 1 for p in paths], parents)
        tokens, end, positions, parent = (jnp.asarray([x], jnp.int32) for x in integers)
        mask = jnp.asarray([[p >= 0 for p in self.parents]])
        zero = jnp.zeros((1, t), jnp.int32)
        return Rows(tokens, end, positions, parent, mask, zero, zero[:, 0])


@st.composite
def forests(draw: st.DrawFn, size: int = T) -> Forest:
    """In preorder a token continues its predecessor or one of its ancestors, or begins a tree."""
    parents = [-1]
    for i in range(1, size):
        choices = [*Forest(parents).path(i - 1), -1]
        parents.append(choices[min(draw(st.integers(0, 2 * len(choices))) // 2, len(choices) - 1)])
    return Forest(parents)


def twin(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, forest: Forest, window: int | None = None
) -> np.ndarray:
    """Softmax over a token's path, nearest first, for one row; query head h reads key head h//2."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for i in range(q.shape[0]):
        path = forest.path(i)[:window]
        for h in range(q.shape[1]):
            kv = [0, 0, 1, 1][h]
            scores = k[path, kv] @ q[i, h] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v[path, kv] / weights.sum()
    return out


def qkv(seed: int, t: int = T) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((t, HEADS, WIDTH), (t, KEY_HEADS, WIDTH), (t, KEY_HEADS, WIDTH))
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return 2 * q, k, v


@jax.jit
def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> list[jax.Array]:
    """Unlimited, and with windows of 1 and 3."""
    return [attention(q[None], k[None], v[None], rows, w)[0] for w in (None, 1, 3)]


@given(forests(), st.integers(0, 99))
def test_attention_of_any_forest_equals_its_paths_softmax(forest: Forest, seed: int) -> None:
    rows = forest.rows()
    check_rows(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "BLOCK", 4)  # 11 tokens: 4 + 4 + 3
        got = in_blocks(*map(jnp.asarray, qkv(seed)), rows)
    for out, window in zip(got, (None, 1, 3), strict=True):
        np.testing.assert_allclose(out, twin(*qkv(seed), forest, window), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("block", [10, 11, 3])
def test_attention_does_not_depend_on_block_boundaries(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forest = Forest([-1, 0, 1, 2, 1, 4, 5, 0, 7, 8, 9])
    monkeypatch.setattr(layers, "BLOCK", block)
    q, k, v = (jnp.asarray(x)[None] for x in qkv(0))
    out = jax.jit(lambda *x: attention(*x))(q, k, v, forest.rows())
    np.testing.assert_allclose(out[0], twin(*qkv(0), forest), rtol=1e-5, atol=2e-6)


def test_attention_just_past_the_block_that_ships() -> None:
    t = layers.BLOCK + 2
    rows = causal_rows(jnp.zeros((1, t), jnp.int32), jnp.full(1, t, jnp.int32))
    q, k, v = (jnp.asarray(x)[None] for x in qkv(1, t))
    out = jax.jit(lambda *x: attention(*x))(q, k, v, rows)
    want = twin(*qkv(1, t), Forest(list(range(-1, t - 1))))
    np.testing.assert_allclose(out[0], want, rtol=1e-5, atol=2e-6)


def test_attention_gradient_equals_the_twins_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along a random direction, by central differences in float64."""
    monkeypatch.setattr(layers, "BLOCK", 4)
    forest = Forest([-1, 0, 1, 2, 1, 4, -1, 6, 7, 6, 9])
    point, direction = qkv(2), qkv(3)
    weights = np.random.default_rng(4).normal(size=(T, HEADS, WIDTH)).astype(np.float32)

    def loss(x: list[jax.Array]) -> jax.Array:
        q, k, v = (a[None] for a in x)
        return (attention(q, k, v, forest.rows(), 3)[0] * weights).sum()

    def moved(step: float) -> float:
        pairs = zip(point, direction, strict=True)
        q, k, v = (x.astype(np.float64) + step * d for x, d in pairs)
        return float((twin(q, k, v, forest, 3) * weights).sum())

    gradient = jax.jit(jax.grad(loss))([jnp.asarray(x) for x in point])
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-4)


def test_a_window_counts_tokens_of_the_path_not_of_the_row() -> None:
    """A branch's first token sees the prompt's last, however many tokens other branches took."""
    forest = Forest([-1, 0, 1, 2, 3, 4, 5, 6, 7, 1, 9])
    seen = layers.visible(forest.rows().end, forest.rows().positions, 9, 11, 2)
    assert np.nonzero(np.asarray(seen[0, 0]))[0].tolist() == [1, 9]
    assert np.nonzero(np.asarray(seen[0, 1]))[0].tolist() == [9, 10]


def test_padding_sees_itself_only() -> None:
    rows = causal_rows(jnp.zeros((2, 4), jnp.int32), jnp.asarray([2, 4], jnp.int32))
    seen = np.asarray(layers.visible(rows.end, rows.positions, 0, 4))
    assert seen[0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]
    np.testing.assert_array_equal(seen[1], np.tri(4, dtype=bool))
    zero = jax.tree.map(jnp.zeros_like, rows)
    seen = np.asarray(layers.visible(zero.end, zero.positions, 0, 4))
    np.testing.assert_array_equal(seen, np.broadcast_to(np.eye(4, dtype=bool), (2, 4, 4)))


def test_query_heads_share_key_heads_in_order() -> None:
    """With one key a query reads its head's value alone: 4 query and 2 key heads → 0, 0, 1, 1."""
    rows = causal_rows(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    v = jnp.asarray([0.0, 1.0]).reshape(1, 1, 2, 1)
    q, k = jnp.ones((1, 1, 4, 1)), jnp.ones((1, 1, 2, 1))
    out = jax.jit(lambda *x: attention(*x))(q, k, v, rows)
    assert out.reshape(-1).tolist() == [0.0, 0.0, 1.0, 1.0]


@given(st.integers(0, 999), st.floats(-3, 3))
def test_rms_norm_equals_its_definition(seed: int, magnitude: float) -> None:
    rng = np.random.default_rng(seed)
    x = (10**magnitude * rng.normal(size=(3, 5))).astype(np.float32)
    scale = rng.normal(size=5).astype(np.float32)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * scale
    got = rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-5)
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_rms_norm_computes_in_float32_and_keeps_the_dtype() -> None:
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)
    got = rms_norm(x, jnp.ones(2, jnp.bfloat16), 0.0)
    assert got.dtype == jnp.bfloat16
    want = np.array([[3.0, 4.0]]) / np.sqrt(12.5)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8)
    assert not np.isnan(np.asarray(rms_norm(jnp.zeros((1, 2)), jnp.ones(2), 1e-5))).any()


def test_rms_norm_adds_the_offset_to_the_scale() -> None:
    x, scale = jnp.asarray([[3.0, 4.0]]), jnp.asarray([0.5, -1.0])
    want = np.array([[3.0, 4.0]]) / np.sqrt(12.5) * [1.5, 0.0]
    np.testing.assert_allclose(rms_norm(x, scale, 0.0, 1.0), want, rtol=1e-6)


def test_scores_are_scaled_then_capped_then_masked() -> None:
    """Two keys, one value feature: the weight of the second is a logistic function."""
    rows = causal_rows(jnp.zeros((1, 2), jnp.int32), jnp.full(1, 2, jnp.int32))
    q, k = jnp.asarray([[[[0.0]], [[3.0]]]]), jnp.asarray([[[[0.0]], [[4.0]]]])
    v = jnp.asarray([[[[0.0]], [[1.0]]]])
    out = jax.jit(lambda *x: attention(*x, scale=0.5, softcap=2.0))(q, k, v, rows)
    score = 2 * np.tanh(0.5 * 12 / 2)
    np.testing.assert_allclose(out.reshape(-1), [0.0, 1 / (1 + np.exp(-score))], rtol=1e-6)


def test_a_traced_window_is_a_static_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BLOCK", 4)
    forest = Forest([-1, 0, 1, 2, 1, 4, 5, 0, 7, 8, 9])
    q, k, v = (jnp.asarray(x)[None] for x in qkv(5))
    out = jax.jit(lambda w: attention(q, k, v, forest.rows(), w)[0])(jnp.asarray(3, jnp.int32))
    np.testing.assert_allclose(out, twin(*qkv(5), forest, 3), rtol=1e-5, atol=2e-6)


def test_gelu_and_the_cap_by_their_formulas() -> None:
    x = np.linspace(-4, 4, 9, dtype=np.float32)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    np.testing.assert_allclose(gelu(jnp.asarray(x)), 0.5 * x * (1 + np.tanh(inner)), atol=1e-6)
    np.testing.assert_allclose(soft_cap(jnp.asarray(x), 2.0), 2 * np.tanh(x / 2), atol=1e-6)
    assert soft_cap(jnp.asarray(x), None).tolist() == x.tolist()
