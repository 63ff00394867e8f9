"""DoRA, PiSSA, embeddings and experts; merging and back; adapters apart from their base."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from purepost import train
from purepost.algorithms import sft
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.tree import map_named, named_leaves
from purepost.types import causal_rows
from purepost.weights import (
    ALL_LINEAR,
    LowRank,
    adapter_of,
    add_adapters,
    add_lora,
    freeze,
    grouped_linear,
    interpolate_adapters,
    linear,
    lookup,
    merge,
    pissa,
    quantize,
    scale_adapter,
    train_only,
    transposed_linear,
    unmerge,
    with_adapter,
)
from purepost.weights.linear import dense
from tests.compare import assert_same_bits

CONFIG = Config(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
ROWS = causal_rows(jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 0]], jnp.int32), jnp.asarray([4, 3]))
EVERYTHING = f"{ALL_LINEAR}|^embed$"


@pytest.fixture(scope="module")
def model() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def low_rank(*lead: int, dora: bool = False) -> LowRank:
    """[*lead, 12, 8] of random numbers."""
    magnitude = 1 + jnp.abs(normal(3, *lead, 8)) if dora else None
    parts = (normal(0, *lead, 12, 8), normal(1, *lead, 12, 2), normal(2, *lead, 2, 8))
    return LowRank(*parts, 0.5, 0.0, magnitude)


def trained(model: Decoder, seed: int = 0) -> Decoder:
    """The model with other numbers in its adapters."""

    def move(name: str, x: jax.Array) -> jax.Array:
        own = name.endswith((".a", ".b", ".magnitude"))
        return x + 0.1 * normal(seed + len(name), *x.shape) if own else x

    return map_named(move, model)


def logits(model: Decoder) -> jax.Array:
    return eqx.filter_jit(lambda m: m.unembed(m(ROWS)[0]))(model)


def test_doras_columns_are_as_long_as_it_says() -> None:
    w = low_rank(dora=True)
    base, a, b = (np.asarray(x, np.float64) for x in (w.base, w.a, w.b))
    assert w.magnitude is not None
    total = base + 0.5 * a @ b
    expected = total * (np.asarray(w.magnitude) / np.linalg.norm(total, axis=0))
    np.testing.assert_allclose(dense(w), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(dense(w), axis=0), w.magnitude, rtol=1e-5)
    x = normal(4, 3, 12)
    np.testing.assert_allclose(linear(x, w), x @ expected, rtol=1e-4, atol=1e-4)


def test_doras_norm_is_a_constant_in_the_gradient() -> None:
    """∂/∂b of x·(W + s·AB)·g, g held; ∂/∂m has the column's direction."""
    w, x, y = low_rank(dora=True), normal(4, 3, 12), normal(5, 3, 8)
    grads = jax.grad(lambda w: (linear(x, w) * y).sum())(w)
    assert w.magnitude is not None
    total = np.asarray(w.base + 0.5 * w.a @ w.b, np.float64)
    norm = np.linalg.norm(total, axis=0)
    held = 0.5 * np.asarray(x @ w.a).T @ (np.asarray(y) * np.asarray(w.magnitude) / norm)
    np.testing.assert_allclose(grads.b, held, rtol=1e-4, atol=1e-4)
    direction = ((np.asarray(x) @ total) * np.asarray(y)).sum(0) / norm
    np.testing.assert_allclose(grads.magnitude, direction, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_every_product_is_that_of_the_merged_weight(dora: bool) -> None:
    """Values and gradients; lookups and heads of embeddings, experts."""
    w = low_rank(dora=dora)
    full = dense(w)
    x, y = normal(4, 2, 3, 12), normal(5, 2, 3, 8)
    np.testing.assert_allclose(linear(x, w), x @ full, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(transposed_linear(y, w), y @ full.T, rtol=1e-4, atol=1e-4)
    index = jnp.asarray([[0, 11], [5, 5]])
    np.testing.assert_allclose(lookup(w, index), full[index], rtol=1e-4, atol=1e-4)
    fused = jax.grad(lambda x: (linear(x, w) * y).sum())(x)
    np.testing.assert_allclose(fused, y @ full.T, rtol=1e-4, atol=1e-4)
    experts = low_rank(2, dora=dora)
    got = grouped_linear(x[0], experts, jnp.asarray([1, 2]))
    own = [x[0, :1] @ dense(experts)[0], x[0, 1:] @ dense(experts)[1]]
    np.testing.assert_allclose(got, jnp.concatenate(own), rtol=1e-4, atol=1e-4)


def test_gradients_of_the_fused_path_are_the_merged_paths(model: Decoder) -> None:
    """∂L/∂A and ∂L/∂B, through the whole model, on raw weights and on quantised ones."""
    for base in (model, quantize(model, block=8)):
        adapted = trained(add_lora(base, rank=2, where=EVERYTHING, key=jr.key(1)))
        params = {n: (w.a, w.b) for n, w in adapter_of(adapted).items()}

        def value(params: Any, fold: Any, adapted: Decoder = adapted) -> jax.Array:
            own = adapter_of(adapted)
            new = {n: replace(own[n], a=a, b=b) for n, (a, b) in params.items()}
            model = fold(with_adapter(adapted, new))
            return jnp.tanh(model.unembed(model(ROWS)[0])).sum()

        fused, folded = (
            jax.jit(jax.grad(value), static_argnums=1)(params, f) for f in (lambda m: m, merge)
        )
        for x, y in zip(jax.tree.leaves(fused), jax.tree.leaves(folded), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{"dora": True}, {"start": pissa}, {"where": EVERYTHING}])
def test_what_starts_changes_nothing(model: Decoder, options: dict[str, Any]) -> None:
    adapted = add_lora(model, **({"rank": 4, "key": jr.key(1)} | options))
    np.testing.assert_allclose(logits(adapted), logits(model), rtol=1e-5, atol=2e-5)


def test_pissa_takes_the_largest_singular_values(model: Decoder) -> None:
    """A·B is the best approximation of its rank: what is left has the other singular values."""
    up = dict(adapter_of(add_lora(model, rank=4, alpha=8.0, start=pissa, key=jr.key(1))))
    left = merge(add_lora(model, rank=4, start=pissa, key=jr.key(1)))
    w = model.layers.mlp.up
    assert isinstance(w, jax.Array) and isinstance(left.layers.mlp.up, jax.Array)
    np.testing.assert_allclose(left.layers.mlp.up, w, atol=1e-5)
    values = np.linalg.svd(np.asarray(w, np.float64)[1], compute_uv=False)
    a, b = up["layers.mlp.up"].a[1], up["layers.mlp.up"].b[1]
    found = np.linalg.svd(2.0 * np.asarray(a @ b, np.float64), compute_uv=False)
    np.testing.assert_allclose(found[:4], values[:4], rtol=1e-4)
    # A and B share them evenly, the scale taken out.
    np.testing.assert_allclose(jnp.linalg.norm(a, axis=0) ** 2, values[:4] / 2, rtol=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(b, axis=1) ** 2, values[:4] / 2, rtol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_unmerging_restores_the_bits(model: Decoder, dora: bool) -> None:
    adapted = trained(add_lora(model, rank=2, dora=dora, key=jr.key(1)))
    merged = merge(adapted, keep=True)
    np.testing.assert_array_equal(logits(merged), logits(merge(adapted)))
    assert_same_bits(merge(merged), merge(adapted))
    assert_same_bits(unmerge(merged), adapted)
    assert jax.tree.structure(unmerge(merged)) == jax.tree.structure(adapted)


def test_merging_on_a_quantised_base(model: Decoder) -> None:
    """Added to the numbers that it stands for, or to the original ones when these are given."""
    adapted = trained(add_lora(quantize(model, block=8), rank=2, alpha=4.0, key=jr.key(1)))
    w = adapted.layers.mlp.up
    assert isinstance(w, LowRank)
    delta = 2.0 * np.asarray(w.a, np.float64) @ np.asarray(w.b, np.float64)
    for merged, base in (
        (merge(adapted), w.base.dense()),
        (merge(adapted, onto=model), model.layers.mlp.up),
    ):
        got = merged.layers.mlp.up
        assert isinstance(got, jax.Array)
        np.testing.assert_allclose(got, np.asarray(base) + delta, rtol=1e-5, atol=1e-5)


def test_adapters_add_scale_and_interpolate(model: Decoder) -> None:
    """By what they add to the weights; ranks and scales may differ, and so may their paths."""
    one = adapter_of(trained(add_lora(model, rank=2, key=jr.key(1)), 1))
    narrow = add_lora(model, rank=3, alpha=2.0, where=r"mlp\.(up|down)$", key=jr.key(2))
    two = adapter_of(trained(narrow, 2))

    def delta(adapter: Any, name: str) -> np.ndarray:
        if name not in adapter:
            return np.zeros(())
        w = adapter[name]
        return w.scale * np.asarray(w.a, np.float64) @ np.asarray(w.b, np.float64)

    found = {
        "sum": (add_adapters(one, two), 1.0, 1.0),
        "less": (add_adapters(one, scale_adapter(two, -2)), 1.0, -2.0),
        "mixed": (interpolate_adapters(one, two, 0.25), 0.75, 0.25),
    }
    for adapter, u, v in found.values():
        assert adapter.keys() == one.keys() | two.keys()
        for name in adapter:
            expected = u * delta(one, name) + v * delta(two, name)
            np.testing.assert_allclose(delta(adapter, name), expected, rtol=1e-5, atol=1e-5)
    nothing = add_adapters(one, scale_adapter(one, -1))
    np.testing.assert_allclose(logits(with_adapter(model, nothing)), logits(model), atol=1e-4)


def test_adapters_that_do_not_fit_are_errors(model: Decoder) -> None:
    one = adapter_of(add_lora(model, rank=2, key=jr.key(1)))
    with pytest.raises(ValueError, match="paths of the model, got elsewhere, which is none of"):
        with_adapter(model, {"elsewhere": one["layers.mlp.up"]})
    swapped = {"layers.mlp.up": one["layers.mlp.down"]}
    with pytest.raises(ValueError, match=r"of layers\.mlp\.up \[2, 16, 32\], got one of \[2, 32"):
        with_adapter(model, swapped)
    with pytest.raises(ValueError, match="expected a model with adapters, got none"):
        adapter_of(model)
    dora = adapter_of(add_lora(model, rank=2, dora=True, key=jr.key(1)))
    with pytest.raises(ValueError, match="got DoRA's on layers.attention.q"):
        scale_adapter(dora, 2.0)


def test_filters_narrow_what_trains(model: Decoder) -> None:
    def names(marks: Any) -> set[str]:
        return {name for name, on in named_leaves(marks) if on}

    everything = {name for name, _ in named_leaves(model)}
    assert names(train_only(r"mlp\.")(model)) == {n for n in everything if "mlp." in n}
    assert names(freeze("embed|norm")(model)) == {
        n for n in everything if "embed" not in n and "norm" not in n
    }
    adapted = add_lora(model, rank=2, key=jr.key(1))
    assert names(train_only(r"up\.")(adapted)) == {"layers.mlp.up.a", "layers.mlp.up.b"}
    assert len(names(freeze(r"\.a$")(adapted))) == 7
    for narrow in (train_only("embed"), freeze("absent")):
        with pytest.raises(ValueError, match="matches something that trains, got where="):
            narrow(adapted)


def test_frozen_leaves_stay_out_of_everything(model: Decoder) -> None:
    """They have no moments, and codes keep their bits."""
    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(0.1, weight_decay=0.1))
    state = sft(optimizer, trainable=train_only("norm")).init(jr.key(0), quantize(model, block=8))
    moments = {name for name, x in named_leaves(state.opt_state.inner) if x.ndim}
    assert moments and all("norm" in name for name in moments)
    algorithm = sft(optimizer, trainable=train_only("norm"))
    for _, new, _ in train(algorithm, state, lambda step: ROWS, key=jr.key(0), steps=2):
        assert_same_bits(new.frozen, state.frozen)
        still = {n for n, x in named_leaves(new.frozen) if x.dtype == jnp.uint8}
        assert len(still) == 7
