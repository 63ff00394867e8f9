"""Adapters: nothing at the start, their scale, merging, filters, errors."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models.containers import policy_trainable, with_reference
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.tree import named_leaves
from purepost.types import causal_rows
from purepost.weights import (
    LowRank,
    adapters,
    add_lora,
    default_trainable,
    has_adapters,
    initial_adapters,
    linear,
    lora_scale,
    merge,
    shape_of,
    without_lora,
)

CONFIG = Config(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
ROWS = causal_rows(jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 0]], jnp.int32), jnp.asarray([4, 3]))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


def low_ranks(model) -> dict[str, LowRank]:
    """Every adapted weight by its name."""
    found = named_leaves(model, lambda x: isinstance(x, LowRank))
    return {name: w for name, w in found if isinstance(w, LowRank)}


def array(w: Any) -> jax.Array:
    """A weight that is to be a raw array."""
    assert isinstance(w, jax.Array)
    return w


def trained(model: Decoder) -> Decoder:
    """The model with other adapters than the initial ones."""
    keep = adapters(model)
    return jax.tree.map(
        lambda x, on: x + 0.1 * jr.normal(jr.key(x.size), x.shape) if on else x, model, keep
    )


def hidden(model, key=None):
    return eqx.filter_jit(lambda m, k: m(ROWS, key=k)[0])(model, key)


def test_a_new_adapter_changes_nothing_to_the_bit(model):
    adapted = add_lora(model, rank=4, key=jr.key(1))
    np.testing.assert_array_equal(hidden(adapted), hidden(model))
    assert initial_adapters(adapted)
    assert not initial_adapters(trained(adapted))
    assert len(low_ranks(adapted)) == 7


def test_a_weight_is_base_plus_scaled_product():
    rng = np.random.default_rng(0)
    w, a, b, x = (rng.normal(size=s).astype(np.float32) for s in [(5, 3), (5, 2), (2, 3), (4, 5)])
    got = linear(jnp.asarray(x), LowRank(*map(jnp.asarray, (w, a, b)), scale=1.5))
    x64, w64, a64, b64 = (y.astype(np.float64) for y in (x, w, a, b))
    np.testing.assert_allclose(got, x64 @ w64 + 1.5 * (x64 @ a64) @ b64, rtol=1e-5, atol=1e-6)


def test_scales():
    assert lora_scale(4, 8.0) == 2.0
    assert lora_scale(4, 8.0, rank_stabilized=True) == 4.0
    assert lora_scale(16, 8.0) == 0.5
    assert lora_scale(16, 8.0, rank_stabilized=True) == 2.0


@pytest.mark.parametrize(("stabilized", "plain", "wide"), [(False, 2.0, 0.5), (True, 4.0, 2.0)])
def test_ranks_by_path(model, stabilized, plain, wide):
    options: dict[str, Any] = {"rank": 4, "alpha": 8.0, "rank_stabilized": stabilized}
    adapted = add_lora(model, **options, ranks={"q$": 16}, key=jr.key(1))
    found = low_ranks(adapted)
    assert {n for n, w in found.items() if w.scale == wide} == {"layers.attention.q"}
    assert {w.scale for n, w in found.items() if n != "layers.attention.q"} == {plain}
    assert found["layers.attention.q"].a.shape == (2, 16, 16)
    assert found["layers.attention.k"].b.shape == (2, 4, 8)


def test_alphas_by_path(model):
    adapted = add_lora(model, rank=4, alpha=8.0, alphas={"mlp": 16.0}, key=jr.key(1))
    assert {n for n, w in low_ranks(adapted).items() if w.scale == 4.0} == {
        "layers.mlp.gate",
        "layers.mlp.up",
        "layers.mlp.down",
    }


def test_adapters_start_uniform_and_float32_also_on_a_bf16_base():
    model = init_decoder(jr.key(0), CONFIG, jnp.bfloat16)
    adapted = add_lora(model, rank=4, key=jr.key(1))
    q = low_ranks(adapted)["layers.attention.q"]
    assert q.a.dtype == q.b.dtype == jnp.float32 and q.base.dtype == jnp.bfloat16
    assert float(jnp.abs(q.a).max()) <= 1 / 4  # 1/√16
    assert float(jnp.abs(q.a).max()) > 0.2
    assert not q.b.any()
    assert array(merge(trained(adapted)).layers.attention.q).dtype == jnp.bfloat16


def test_an_adapter_starts_the_same_whatever_else_is_adapted(model):
    every = low_ranks(add_lora(model, rank=4, key=jr.key(1)))
    one = low_ranks(add_lora(model, where=r"attention\.q$", rank=4, key=jr.key(1)))
    assert list(one) == ["layers.attention.q"]
    np.testing.assert_array_equal(one["layers.attention.q"].a, every["layers.attention.q"].a)
    assert (every["layers.mlp.gate"].a != every["layers.mlp.up"].a).any()


def test_merging_leaves_the_outputs(model):
    adapted = trained(add_lora(model, rank=4, key=jr.key(1)))
    merged = merge(adapted)
    assert not has_adapters(merged)
    assert float(jnp.abs(hidden(adapted) - hidden(model)).max()) > 0.1
    # x(W + sAB) and xW + s(xA)B round differently, in every layer.
    np.testing.assert_allclose(hidden(merged), hidden(adapted), atol=1e-5, rtol=0)


def test_merging_is_the_sum_in_float64(model):
    adapted = trained(add_lora(model, rank=4, alpha=8.0, key=jr.key(1)))
    q = low_ranks(adapted)["layers.attention.q"]
    base, a, b = (np.asarray(x, np.float64) for x in (q.base, q.a, q.b))
    np.testing.assert_allclose(
        array(merge(adapted).layers.attention.q), base + 2.0 * a @ b, rtol=1e-6, atol=1e-6
    )
    assert shape_of(q) == base.shape == shape_of(q.base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "absent"}, r"where='absent', which matches none of: embed, layers\."),
        ({"where": "attention_norm$"}, "expected matrices, but .* layers.attention_norm"),
        ({"where": "^norm$"}, "expected matrices, but .* norm, which is none"),
        ({"rank": 17}, r"expected 1 ≤ rank ≤ \d+ for layers\.\S+ \[\d+, \d+\], got 17"),
        ({"rank": 0}, "expected 1 ≤ rank"),
        ({"rank": 4, "ranks": {"absent": 2}}, "'absent' matches none of the adapted paths"),
        ({"rank": 4, "alphas": {"absent": 2.0}}, "'absent' matches none of the adapted paths"),
        ({"rank": 4, "dropout": 1.0}, "expected 0 ≤ dropout < 1, got 1.0"),
    ],
)
def test_errors(model, options, message):
    with pytest.raises(ValueError, match=message):
        add_lora(model, **options, key=jr.key(1))


def test_an_adapter_on_an_adapter_is_an_error(model):
    adapted = add_lora(model, rank=4, key=jr.key(1))
    with pytest.raises(ValueError, match="has an adapter already; merge it"):
        add_lora(adapted, rank=4, key=jr.key(2))
    merged = merge(trained(adapted))
    assert has_adapters(add_lora(merged, rank=4, key=jr.key(2)))


def test_filters_mark_adapters_only(model):
    adapted = add_lora(model, rank=4, key=jr.key(1))
    marks = dict(named_leaves(adapters(adapted)))
    assert {n.rsplit(".", 1)[1] for n, on in marks.items() if on} == {"a", "b"}
    assert sum(marks.values()) == 14
    assert jax.tree.structure(adapters(adapted)) == jax.tree.structure(adapted)
    assert default_trainable(adapted) == adapters(adapted)
    assert all(jax.tree.leaves(default_trainable(model)))
    assert not any(jax.tree.leaves(adapters(model)))


def test_the_base_is_the_same_arrays(model):
    base = without_lora(trained(add_lora(model, rank=4, key=jr.key(1))))
    one, two = jax.tree.leaves(base), jax.tree.leaves(model)
    assert len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def test_a_reference_keeps_a_trained_adapter_and_drops_an_initial_one(model):
    fresh = add_lora(model, rank=4, key=jr.key(1))
    assert not has_adapters(with_reference(fresh).reference)
    loaded = with_reference(trained(fresh))
    assert has_adapters(loaded.reference)
    assert loaded.reference is not None
    np.testing.assert_array_equal(hidden(loaded.reference), hidden(loaded.policy))
    marks = policy_trainable(loaded)
    assert not any(jax.tree.leaves(marks.reference))
    assert sum(jax.tree.leaves(marks.policy)) == 14


def test_dropout_needs_a_key(model):
    adapted = trained(add_lora(model, rank=4, dropout=0.5, key=jr.key(1)))
    certain = without_dropout(adapted)
    np.testing.assert_array_equal(hidden(adapted), hidden(certain))
    np.testing.assert_array_equal(hidden(certain, jr.key(2)), hidden(certain))
    assert float(jnp.abs(hidden(adapted, jr.key(2)) - hidden(adapted)).max()) > 1e-2
    assert (hidden(adapted, jr.key(2)) != hidden(adapted, jr.key(3))).any()


def without_dropout(model: Decoder) -> Decoder:
    return jax.tree.map(
        lambda w: dataclasses.replace(w, dropout=0.0) if isinstance(w, LowRank) else w,
        model,
        is_leaf=lambda w: isinstance(w, LowRank),
    )


def test_dropout_zeroes_the_adapters_input_and_keeps_its_mean():
    w = LowRank(jnp.zeros((1000, 1)), jnp.ones((1000, 1)), jnp.ones((1, 1)), 1.0, 0.25)
    x = jnp.ones((8, 5, 1000))
    keys = jr.split(jr.key(0), 8)
    kept = linear(x, w, key=keys) * 0.75  # the number of inputs kept
    assert abs(float(kept.mean()) - 750) < 5
    assert len(np.unique(np.asarray(kept))) > 10


def test_dropout_belongs_to_the_row_not_to_its_place(model):
    adapted = trained(add_lora(model, rank=4, dropout=0.5, key=jr.key(1)))
    swapped = jax.tree.map(lambda x: x[::-1], ROWS)
    both = [eqx.filter_jit(lambda r: adapted(r, key=jr.key(2))[0])(r) for r in (ROWS, swapped)]
    np.testing.assert_allclose(both[0], both[1][::-1], rtol=1e-5, atol=1e-6)


def test_adapters_train_without_a_gradient_of_the_base(model):
    adapted = trained(add_lora(model, rank=4, key=jr.key(1)))
    params, frozen = eqx.partition(adapted, adapters(adapted))

    @jax.jit
    def gradient(params):
        return jax.grad(lambda p: eqx.combine(p, frozen)(ROWS)[0].sum())(params)

    grads = dict(named_leaves(gradient(params)))
    assert len(grads) == 14
    assert all(name.endswith((".a", ".b")) and bool(jnp.any(g != 0)) for name, g in grads.items())
