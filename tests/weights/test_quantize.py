"""Weights in few bits: codes against their definitions, layers, lookups, errors."""

from functools import partial
from statistics import NormalDist
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import generate, pad_prompts
from purepost.tree import named_leaves
from purepost.types import causal_rows
from purepost.weights import (
    LowRank,
    Quantized,
    add_lora,
    default_trainable,
    dequantize,
    fp8,
    grouped_linear,
    int4,
    int8,
    linear,
    lookup,
    merge,
    nf4,
    pissa,
    quantization_errors,
    quantize,
    shape_of,
    transposed_linear,
)
from purepost.weights.quantized import NF4, Scales

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
KINDS = {"int8": int8, "fp8": fp8, "int4": int4, "nf4": nf4}
# ‖Q(W) − W‖ / ‖W‖ of normal numbers: uniform rounding by Δ costs Δ/√12, relative rounding of 3
# mantissa bits some 2^-4/√3·…; measured by NumPy below for the tables.
WORST = {"int8": 0.011, "fp8": 0.03, "int4": 0.13, "nf4": 0.1}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return init_decoder(jr.key(0), CONFIG)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def hidden(model: Any) -> jax.Array:
    return eqx.filter_jit(lambda m: m.unembed(m(ROWS)[0]))(model)


def test_nf4_is_the_quantiles_of_a_normal_distribution() -> None:
    """bitsandbytes' table, derived: eight quantiles above 0, seven below, 0 itself, over the
    largest.
    """
    top, inverse = 0.9677083, NormalDist().inv_cdf
    above = [inverse(p) for p in np.linspace(top, 0.5, 9)[:-1]]
    below = [-inverse(p) for p in np.linspace(top, 0.5, 8)[:-1]]
    derived = np.sort([*above, *below, 0.0]) / max(above)
    np.testing.assert_allclose(NF4, derived, rtol=0, atol=2e-7)


def test_nf4_codes_are_the_nearest_levels() -> None:
    """In float64, block by block; two codes to a byte, the block's first half in the low bits."""
    w = normal(64, 3)
    q = nf4(w, 32, double=False)
    assert q.codes.shape == (32, 3) and q.codes.dtype == jnp.uint8
    assert isinstance(q.scales, jax.Array)
    for n in range(2):
        block = np.asarray(w, np.float64)[32 * n : 32 * n + 32]
        top = np.abs(block).max(0)
        np.testing.assert_array_equal(q.scales[n], top.astype(np.float32))
        near = np.abs((block / top)[..., None] - np.asarray(NF4)).argmin(-1)
        bytes_ = np.asarray(q.codes)[16 * n : 16 * n + 16]
        np.testing.assert_array_equal(np.concatenate([bytes_ & 15, bytes_ >> 4]), near)
        values = np.asarray(NF4)[near] * top
        np.testing.assert_allclose(q.dense()[32 * n : 32 * n + 32], values, rtol=1e-6)


def test_scales_are_quantised_in_blocks_of_256() -> None:
    """Each by at most half a 127th of its block's largest distance from the mean."""
    w = normal(1280, 40)  # 800 scales: three blocks and a part
    plain, double = nf4(w, double=False), nf4(w)
    assert isinstance(double.scales, Scales) and isinstance(plain.scales, jax.Array)
    assert double.scales.codes.dtype == jnp.int8 and double.scales.outer.shape == (4,)
    scales = np.asarray(plain.scales, np.float64).ravel()
    error = np.abs(np.asarray(double.scales.values()).ravel() - scales)
    for n in range(4):
        part = slice(256 * n, 256 * n + 256)
        assert error[part].max() <= np.abs(scales[part] - scales.mean()).max() / 254 * 1.001
    np.testing.assert_array_equal(plain.codes, double.codes)
    bits = 8 * sum(x.nbytes for x in jax.tree.leaves(double)) / w.size
    assert bits / 16 <= 0.27  # of bfloat16's
    assert bits == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, abs=0.01)


def test_int8_and_fp8_round_by_channel() -> None:
    w = np.asarray(normal(20, 6), np.float64)
    top = np.abs(w).max(0)
    q = int8(jnp.asarray(w, jnp.float32))
    np.testing.assert_array_equal(q.codes, np.round(w / top * 127))
    assert np.abs(q.dense() - w).max() <= (top / 254).max() * 1.0001
    f = fp8(jnp.asarray(w, jnp.float32))
    assert isinstance(f.scales, jax.Array) and f.scales.shape == (1, 6)
    assert f.codes.dtype == jnp.float8_e4m3fn
    # Three bits of mantissa: at most 2^-4 of each number, but for the subnormal ones.
    large = np.abs(w) > top * 2**-14
    assert (np.abs(f.dense() - w) <= np.abs(w) * 2**-4 * 1.0001)[large].all()
    np.testing.assert_allclose(np.abs(f.dense()).max(0), top, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_quantised_alone_and_slice_through_a_scan(kind: str) -> None:
    w = normal(3, 128, 16) * jnp.asarray([1.0, 10.0, 0.1])[:, None, None]
    q = quantize({"layers.mlp.up": w}, where="up", kind=KINDS[kind])["layers.mlp.up"]
    assert isinstance(q, Quantized) and q.shape == shape_of(q) == w.shape
    _, sliced = jax.lax.scan(lambda c, layer: (c, layer.dense()), None, q)
    one = jnp.stack([KINDS[kind](w[i], None).dense() for i in range(3)])
    np.testing.assert_allclose(sliced, q.dense(), rtol=1e-6)  # one product and sum, fused or not
    np.testing.assert_allclose(sliced, one, rtol=1e-6)
    errors = quantization_errors({"layers.mlp.up": w}, {"layers.mlp.up": q})["layers.mlp.up"]
    expected = [np.linalg.norm(one[i] - w[i]) / np.linalg.norm(w[i]) for i in range(3)]
    np.testing.assert_allclose(errors, expected, rtol=1e-4)
    assert 1e-3 < errors.max() < WORST[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dense_weight(kind: str) -> None:
    """linear, its transpose, lookups, experts; and the gradients."""
    q = KINDS[kind](normal(64, 8), None)
    dense, x, y = q.dense(), normal(2, 3, 64), normal(2, 3, 8)
    value, grad = jax.value_and_grad(lambda x: (linear(x, q) * y).sum())(x)
    np.testing.assert_allclose(value, (np.asarray(x) @ dense * y).sum(), rtol=1e-4)
    np.testing.assert_allclose(grad, np.asarray(y) @ dense.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(transposed_linear(y, q), y @ dense.T, rtol=1e-5, atol=1e-5)
    index = jnp.asarray([[0, 63], [31, 32]])
    np.testing.assert_allclose(lookup(q, index), dense[index], rtol=1e-6)
    experts = KINDS[kind](normal(2, 64, 8), None)
    got = grouped_linear(x[0], experts, jnp.asarray([1, 2]))
    own = [x[0, :1] @ experts.dense()[0], x[0, 1:] @ experts.dense()[1]]
    np.testing.assert_allclose(got, jnp.concatenate(own), rtol=1e-5, atol=1e-5)


def test_zeros_stay_zeros() -> None:
    for kind in KINDS.values():
        np.testing.assert_array_equal(kind(jnp.zeros((64, 4)), None).dense(), jnp.zeros((64, 4)))


def test_a_quantised_model_is_the_model_of_its_numbers(model: Decoder) -> None:
    """Embeddings too, tied to the head; in training, in sampling, dequantised."""
    q = quantize(model, where=r"layers\.(attention|mlp)\.\w+$|embed", kind=nf4, block=8)
    assert isinstance(q.embed, Quantized)
    dense = dequantize(q)
    assert jax.tree.structure(dense) == jax.tree.structure(model)
    np.testing.assert_allclose(hidden(q), hidden(dense), rtol=1e-5, atol=1e-5)
    prompts, sampling = pad_prompts([[1, 2, 3]], width=4), Sampling(max_tokens=5, temperature=0.0)
    one, two = (generate(jr.key(0), m, prompts, sampling) for m in (q, dense))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.logps, two.logps, rtol=1e-4, atol=1e-5)
    assert set(quantization_errors(model, q)) == {"embed"} | {
        f"layers.{n}" for n in "attention.q attention.k attention.v attention.o".split()
    } | {f"layers.mlp.{n}" for n in ("gate", "up", "down")}


def test_quantised_weights_do_not_train(model: Decoder) -> None:
    q = quantize(model, block=8, kind=fp8)
    names = [name for name, on in named_leaves(default_trainable(q)) if on]
    assert "embed" in names and not [n for n in names if "codes" in n or "scales" in n]
    adapted = add_lora(q, rank=2, key=jr.key(1))
    names = [name for name, on in named_leaves(default_trainable(adapted)) if on]
    assert len(names) == 14 and all(n.endswith((".a", ".b")) for n in names)


def test_bfloat16_stays_the_dtype_of_what_is_computed() -> None:
    model = init_decoder(jr.key(0), CONFIG, jnp.bfloat16)
    adapted = add_lora(quantize(model, block=8), rank=2, key=jr.key(1))
    assert adapted(ROWS)[0].dtype == jnp.bfloat16
    q = adapted.layers.attention.q
    assert isinstance(q, LowRank) and q.a.dtype == jnp.float32
    merged = merge(adapted).layers.attention.q
    assert isinstance(merged, jax.Array) and merged.dtype == jnp.bfloat16


def test_adapters_come_before_or_after(model: Decoder) -> None:
    """The same model either way; and PiSSA's residual is what is quantised."""
    before = quantize(add_lora(model, rank=2, key=jr.key(1)), block=8)
    after = add_lora(quantize(model, block=8), rank=2, key=jr.key(1))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    options: dict[str, Any] = {"rank": 4, "key": jr.key(1), "start": pissa}
    left = quantize(add_lora(model, **options), block=8)
    direct = quantize(model, block=8)
    far = lambda m: float(jnp.abs(merge(dequantize(m)).layers.mlp.up - model.layers.mlp.up).mean())  # noqa: E731 # pyright: ignore
    assert far(left) < far(direct)  # fewer large numbers are left to round
    again = add_lora(direct, **options)
    up = again.layers.mlp.up
    assert isinstance(up, LowRank) and isinstance(up.base, Quantized)
    assert up.base.levels == NF4 and up.base.blocks == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "absent"}, r"where='absent', which matches none of: embed, layers\."),
        ({"where": "attention_norm$"}, "expected matrices, but .* layers.attention_norm"),
        ({"where": "^norm$"}, "expected matrices, but .* norm, which is none"),
        ({"block": 6}, r"layers\.attention\.q: expected blocks that divide 16 inputs, got 6"),
        ({}, r"layers\.attention\.q: expected blocks that divide 16 inputs, got 64"),
        ({"block": 1}, r"layers\.attention\.q: expected blocks of an even size"),
        ({"kind": lambda w, block: w}, r"a kind that quantises layers\.attention\.q, got <func"),
    ],
)
def test_errors(model: Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(model, **options)


def test_what_is_quantised_or_not_finite_is_an_error(model: Decoder) -> None:
    once = quantize(model, kind=int8)
    with pytest.raises(ValueError, match=r"layers\.attention\.q is quantised already"):
        quantize(once, kind=int8)
    for bad in (jnp.nan, jnp.inf):
        up = model.layers.mlp.up
        assert isinstance(up, jax.Array)
        broken = eqx.tree_at(lambda m: m.layers.mlp.up, model, up.at[1, 0, 0].set(bad))
        with pytest.raises(ValueError, match=r"expected finite weights in layers\.mlp\.up"):
            quantize(broken, kind=partial(int4, double=False), block=8)
