"""Attention kernels against the reference: interpreted on a CPU, as they are on a GPU
(`JAX_PLATFORMS=cuda`); and that they lower for both kinds of accelerator.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu

from purepost.models import ActorCritic, Decoder, value_model
from purepost.models import layers as reference
from purepost.models.flash import FlashAttention
from purepost.models.kernels import cudnn_attention, with_attention
from purepost.models.layers import AttentionFn
from purepost.types import Rows, causal_rows, check_rows, group_rows
from tests.models.test_layers import Forest

B, T, HEADS, KEY_HEADS, WIDTH = 6, 53, 4, 2, 8
INTERPRET = jax.default_backend() == "cpu"
Case = tuple[jax.Array, jax.Array, jax.Array, Rows, jax.Array]


def random_forest(seed: int) -> Rows:
    """A row of T tokens in preorder; the last few are padding in some."""
    rng = np.random.default_rng(seed)
    parents, padding = [-1], int(rng.integers(0, 6))
    for i in range(1, T - padding):
        path = Forest(parents).path(i - 1)
        far = rng.random() < 0.3
        parents.append(int(rng.choice([*path, -1])) if far else i - 1)
    row = Forest(parents).rows()
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, padding)]) if x.ndim > 1 else x, row)


def random_case(b: int, t: int, rows: Rows, dtype: Any = jnp.float32) -> Case:
    rng = np.random.default_rng(0)
    shapes = ((b, t, HEADS, WIDTH), (b, t, KEY_HEADS, WIDTH), (b, t, KEY_HEADS, WIDTH))
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return 2 * q, k, v, rows, jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)


pytestmark = pytest.mark.usefixtures("whole_float32")


@pytest.fixture
def whole_float32() -> Iterator[None]:
    """No products of fewer digits, which GPUs would take."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def forests() -> Case:
    found = [random_forest(seed) for seed in range(B)]
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), *found)
    check_rows(rows)
    return random_case(B, T, rows)


def grouped() -> Rows:
    """Prompts of 16 and 9 tokens, three branches of up to 16 each."""
    lengths = jnp.asarray([[16, 3, 9], [0, 16, 16]], jnp.int32)
    return group_rows(
        jnp.zeros((2, 16), jnp.int32),
        jnp.asarray([16, 9], jnp.int32),
        jnp.zeros((2, 3, 16), jnp.int32),
        lengths,
        jnp.arange(16) < lengths[..., None],
    )


def value_and_gradient(attention: AttentionFn, case: Case, window: Any, **options: Any) -> Any:
    """The output, and the gradients of its sum weighted number by number."""
    q, k, v, rows, weights = case
    static = () if isinstance(window, jax.Array) else ("window",)

    @partial(jax.jit, static_argnames=static)
    def both(qkv: tuple[jax.Array, ...], window: Any) -> Any:
        def loss(qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v = qkv
            out = attention(q, k, v, rows, window, **options)
            return (out.astype(jnp.float32) * weights).sum(), out

        grads, out = jax.grad(loss, has_aux=True)(qkv)
        assert all(x.dtype == q.dtype for x in (out, *grads))
        return out, *grads

    return [np.asarray(x, np.float32) for x in both((q, k, v), window=window)]


def assert_same(case: Case, flash: AttentionFn, window: Any, error: float, **options: Any) -> None:
    got = value_and_gradient(flash, case, window, **options)
    want = value_and_gradient(reference.attention, case, window, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=error * np.abs(b).max())


@pytest.mark.parametrize(
    ("blocks", "window", "options"),
    [
        ((16, 32), 3, {"scale": 0.7}),
        ((32, 16), jnp.asarray(4, jnp.int32), {"softcap": 2.0}),
        ((64, 64), None, {}),
    ],
    ids=["window and scale", "traced window and soft-cap", "one block"],
)
def test_values_and_gradients_are_the_references(
    forests: Case, blocks: tuple[int, int], window: Any, options: dict[str, float]
) -> None:
    """Of random forests with padding, in blocks that do not divide them."""
    assert_same(forests, FlashAttention(*blocks, interpret=INTERPRET), window, 1e-5, **options)


def test_branches_in_bf16_as_close_as_its_digits() -> None:
    case = random_case(2, 64, grouped(), jnp.bfloat16)
    assert_same(case, FlashAttention(32, 16, interpret=INTERPRET), None, 2e-2)


blocks_of_16: Any = jax.jit(FlashAttention(16, 16, interpret=INTERPRET))


def test_blocks_that_see_nothing_of_each_other_are_not_visited() -> None:
    """Values that are NaN in one branch would spoil any sum that they are part of."""
    rows = grouped()
    q, k, v, rows, _ = random_case(2, 64, rows)
    clean = jax.jit(reference.attention)(q, k, v, rows)
    out = blocks_of_16(q, k, v.at[:, 16:32].set(jnp.nan), rows)
    others = np.r_[0:16, 32:64]
    np.testing.assert_allclose(out[:, others], clean[:, others], atol=1e-5)
    assert np.isnan(out[0, 16:32]).all()


def test_a_window_leaves_out_what_lies_further_back() -> None:
    rows = causal_rows(jnp.zeros((1, 64), jnp.int32), jnp.full(1, 64, jnp.int32))
    q, k, v, rows, _ = random_case(1, 64, rows)
    window = jnp.asarray(17, jnp.int32)
    clean = jax.jit(reference.attention)(q, k, v, rows, window)
    out = blocks_of_16(q, k, v.at[:, :16].set(jnp.nan), rows, window)
    assert np.isnan(out[0, 16:32]).any()
    np.testing.assert_allclose(out[:, 32:], clean[:, 32:], atol=1e-5)


def test_a_model_attends_by_what_it_is_given(model: Decoder) -> None:
    """One model, or all that a tree of them holds; the rest of them stays."""
    flash = FlashAttention(16, 16, interpret=INTERPRET)
    changed = with_attention(model, flash)
    rows = causal_rows(jnp.ones((1, 9), jnp.int32), jnp.full(1, 9, jnp.int32))
    hidden = eqx.filter_jit(lambda m: m(rows)[0])
    np.testing.assert_allclose(hidden(changed), hidden(model), rtol=1e-5, atol=1e-5)
    assert eqx.tree_equal(with_attention(changed, reference.attention), model)
    both = with_attention(ActorCritic(model, value_model(model)), flash)
    decoders = jax.tree.leaves(both, is_leaf=lambda x: isinstance(x, Decoder))
    assert [x.attend for x in decoders if isinstance(x, Decoder)] == [flash, flash]
    with pytest.raises(ValueError, match="expected a Decoder or models that hold one, got dict"):
        with_attention({"x": jnp.ones(2)}, flash)


def test_blocks_are_powers_of_two() -> None:
    with pytest.raises(ValueError, match="expected key_block to be a power of 2, got 48"):
        FlashAttention(64, 48)


@pytest.mark.parametrize(
    ("flash", "platform", "call"),
    [
        (FlashAttention(), "cuda", "@__gpu$xla.gpu.triton("),
        (FlashAttention(128, 128, tpu.CompilerParams()), "tpu", "@tpu_custom_call("),
    ],
    ids=["gpu", "tpu"],
)
def test_lowers_to_three_programs(flash: FlashAttention, platform: str, call: str) -> None:
    """Forward, the queries' gradient, and that of keys and values, in the device's own language."""
    shape = lambda n: jax.ShapeDtypeStruct((2, 300, n, 96), jnp.bfloat16)  # noqa: E731
    integers = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    rows = jax.eval_shape(causal_rows, integers(2, 300), integers(2))

    def loss(qkv: tuple[jax.Array, jax.Array, jax.Array], rows: Rows) -> jax.Array:
        return flash(*qkv, rows, 128, softcap=30.0).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss)).trace((shape(8), shape(2), shape(2)), rows)
    assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) == 3


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's implementation in the place of cuDNN's, where there is none."""
    if not INTERPRET:
        return
    plain = jax.nn.dot_product_attention

    def replaced(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        return plain(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", replaced)


@pytest.mark.parametrize("window", [None, 3])
def test_plain_rows_by_cudnn(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    lengths = jnp.asarray([T, 20, 1, 0], jnp.int32)
    rows = causal_rows(jnp.zeros((4, T), jnp.int32), lengths)
    q, k, v, rows, _ = random_case(4, T, rows, jnp.bfloat16)
    got, want = jax.jit(
        lambda q, k, v: [
            f(q, k, v, rows, window, scale=0.4) for f in (cudnn_attention, reference.attention)
        ]
    )(q, k, v)
    for i, n in enumerate(lengths.tolist()):
        a, b = (x[i, :n].astype(jnp.float32) for x in (got, want))
        np.testing.assert_allclose(a, b, atol=3e-2)


def test_cudnn_refuses_what_it_cannot_do(forests: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    q, k, v, rows, _ = random_case(2, 64, grouped(), jnp.bfloat16)
    assert np.isnan(jax.jit(cudnn_attention)(q, k, v, rows).astype(jnp.float32)).all()
    with pytest.raises(ValueError, match="expected bfloat16 or float16, got float32"):
        cudnn_attention(*forests[:4])
    with pytest.raises(ValueError, match="expected no soft-cap, got 2.0"):
        cudnn_attention(q, k, v, rows, softcap=2.0)
    with pytest.raises(ValueError, match="expected one window for all layers, got several"):
        cudnn_attention(q, k, v, rows, jnp.asarray(3, jnp.int32))
