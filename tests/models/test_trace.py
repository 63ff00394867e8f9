"""Traces against transformers' maps and states, against shorter models, and against NumPy."""

from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder, init_decoder
from purepost.models.hub import load
from purepost.models.trace import expect_one_vocabulary, expect_pairs, layers_of, spread, trace
from purepost.types import Rows, causal_rows, group_rows
from purepost.weights import add_lora
from tests.compare import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Two rows of a prompt and two branches each, padded."""
    rng = np.random.default_rng(0)
    tokens = lambda *shape: jnp.asarray(rng.integers(0, 19, shape), jnp.int32)  # noqa: E731
    lengths = jnp.asarray([[4, 2], [1, 3]], jnp.int32)
    mask = jnp.arange(4) < lengths[..., None]
    return group_rows(tokens(2, 3), jnp.asarray([3, 2], jnp.int32), tokens(2, 2, 4), lengths, mask)


def shortened(model: Decoder, layers: int) -> Decoder:
    """The model's first layers, with its norm."""
    block = jax.tree.map(lambda x: x[:layers], model.layers)
    return replace(model, layers=block, config=replace(model.config, num_layers=layers))


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text"])
def test_maps_and_states_equal_transformers(family: str) -> None:
    """Windows, soft-caps, two kinds of rotary positions, biases."""
    golden, model = np.load(GOLDEN / "traces.npz"), load(GOLDEN / family).model
    names = [name for name in golden.files if name.startswith(f"{family}.")]
    layers = sorted({int(name.rpartition(".")[2]) for name in names})
    ids = jnp.asarray(golden["ids"], jnp.int32)
    row = causal_rows(ids, jnp.asarray([ids.shape[1]], jnp.int32))
    found = eqx.filter_jit(lambda m: trace(m, row, states=layers, heads=layers))(model)
    everywhere = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    assert len(names) >= 3
    for layer, state, heads in zip(layers, found.states, found.heads, strict=True):
        maps = jnp.exp(heads.log_maps(row, heads.queries, everywhere))
        np.testing.assert_allclose(maps, golden[f"{family}.maps.{layer}"], atol=1e-5)
        if (name := f"{family}.state.{layer}") in names:
            np.testing.assert_allclose(state, golden[name], atol=1e-4)


def test_states_are_those_of_shorter_models(model: Decoder, rows: Rows) -> None:
    """In the order asked for, with repetitions, from either end; hidden states and heads too."""
    whole, kept = model(rows)
    found = trace(model, rows, states=(1, 0, -1), heads=(-2,))
    first, _ = shortened(model, 1)(rows)
    np.testing.assert_array_equal(found.states[0], found.states[2])
    np.testing.assert_allclose(found.hidden, whole, rtol=1e-5, atol=1e-6)
    (heads,) = found.heads
    np.testing.assert_allclose(heads.keys, kept.k[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(heads.values, kept.v[0], rtol=1e-5, atol=1e-6)
    for state, wanted in ((found.states[1], first), (found.states[0], whole)):
        power = (np.asarray(state, np.float64) ** 2).mean(-1, keepdims=True)
        scaled = state / np.sqrt(power + model.config.norm_eps) * np.asarray(model.norm)
        np.testing.assert_allclose(scaled, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_layer_below(model: Decoder, rows: Rows) -> None:
    """Of a sum over a layer's state and keys, against the shorter model's own."""
    weights = jnp.cos(jnp.arange(model.config.hidden_size, dtype=jnp.float32))

    def traced(m: Decoder) -> jax.Array:
        found = trace(m, rows, states=(0,), heads=(1,))
        return (found.states[0] * weights).sum() + (found.heads[0].keys ** 2).sum()

    def plain(m: Decoder) -> jax.Array:
        state = trace(shortened(m, 1), rows, states=(0,)).states[0]
        return (state * weights).sum() + (m(rows)[1].k[1] ** 2).sum()

    got = eqx.filter_jit(eqx.filter_grad(traced))(model)
    want = eqx.filter_jit(eqx.filter_grad(plain))(model)
    assert_close(got, want)
    assert np.abs(got.layers.mlp.up[0]).max() > 0 and not np.asarray(got.layers.mlp.up[1]).any()


def test_maps_of_forests(model: Decoder, rows: Rows) -> None:
    """Each query's map is a softmax over what it sees, from the definition, in float64."""
    (heads,) = trace(model, rows, heads=(0,)).heads
    b, t = rows.tokens.shape
    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    for part in (heads, heads.relations):
        maps = np.exp(part.log_maps(rows, part.queries[:, 3:7], index[:, 3:7]))
        q, k, end = (np.asarray(x, np.float64) for x in (part.queries, part.keys, rows.end))
        share = q.shape[2] // k.shape[2]
        for row, head, i in np.ndindex(b, q.shape[2], 4):
            at = i + 3
            seen = [j for j in range(t) if (j <= at < end[row, j]) or j == at]
            score = np.array([q[row, at, head] @ k[row, j, head // share] for j in seen])
            want = np.zeros(t)
            want[seen] = np.exp(score) / np.exp(score).sum()
            np.testing.assert_allclose(maps[row, head, i], want, rtol=1e-4, atol=1e-6)


def test_dropout_is_the_models_own(model: Decoder, rows: Rows) -> None:
    adapted = add_lora(model, rank=2, alpha=4.0, key=jr.key(1), dropout=0.5)
    adapted = jax.tree.map(lambda x: x + 0.1, adapted)

    @eqx.filter_jit
    def both(m: Decoder) -> tuple:
        key = jr.key(2)
        return trace(m, rows, key=key).hidden, m(rows, key=key)[0], trace(m, rows).hidden

    found, wanted, without = both(adapted)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(found - without).max() > 1e-3


def test_layers_are_spread_evenly(model: Decoder) -> None:
    def deep(layers: int) -> list[tuple[int, int]]:
        return list(spread(model.config, replace(model.config, num_layers=layers)))

    assert deep(2) == [(0, 0), (1, 1)]
    assert deep(6) == [(0, 2), (1, 5)]
    assert deep(5) == [(0, 2), (1, 4)]
    assert deep(1) == [(0, 0), (1, 0)]


def test_what_cannot_be_traced_is_an_error(model: Decoder, rows: Rows) -> None:
    with pytest.raises(ValueError, match="layers from -2 to 1, got 2"):
        trace(model, rows, states=(2,))
    with pytest.raises(ValueError, match="of 1 stacks; this works on one stack only"):
        trace(replace(model, layers={0: model.layers}), rows)
    with pytest.raises(ValueError, match="layers from -2 to 1, got -3"):
        layers_of(model.config, (0, -3))
    with pytest.raises(ValueError, match="at least one pair"):
        expect_pairs(())
    other = init_decoder(jr.key(0), replace(model.config, vocab_size=23))
    with pytest.raises(ValueError, match="student's 19 tokens, got 23"):
        expect_one_vocabulary(model, other)
