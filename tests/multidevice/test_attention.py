"""A kernel runs on every device's own rows and heads, and nothing is gathered for it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from purepost.models import Decoder
from purepost.models.kernels import FlashAttention, with_attention
from purepost.models.layers import attention
from purepost.sharding import TENSOR_PARALLEL, PerDevice, make_mesh, place, place_batch
from purepost.types import Rows, group_rows


def rows() -> Rows:
    lengths = jnp.asarray([[5, 4], [0, 5], [1, 2], [5, 5]], jnp.int32)
    tokens = jnp.arange(4 * 2 * 5).reshape(4, 2, 5) % 64
    prompts = jnp.arange(4 * 6).reshape(4, 6)
    real = jnp.arange(5) < lengths[..., None]
    return group_rows(prompts, jnp.asarray([6, 3, 5, 1], jnp.int32), tokens, lengths, real)


def test_a_kernel_on_eight_devices_is_the_reference_on_one(model: Decoder) -> None:
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    flash = PerDevice(FlashAttention(4, 8, interpret=True), mesh)

    def loss(m: Decoder, rows: Rows) -> jax.Array:
        return jnp.where(rows.mask[..., None], m(rows)[0], 0.0).sum()

    step = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    placed = place(with_attention(model, flash), mesh, TENSOR_PARALLEL)
    got, want = step(placed, place_batch(rows(), mesh)), step(model, rows())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_a_window_that_layers_differ_in_reaches_every_device() -> None:
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    flash = PerDevice(FlashAttention(4, 8, interpret=True), mesh)
    t = rows().tokens.shape[1]
    normal = lambda seed, heads: jr.normal(jr.key(seed), (4, t, heads, 8))  # noqa: E731
    inputs = normal(0, 4), normal(1, 2), normal(2, 2), rows(), jnp.asarray(3, jnp.int32)
    got, want = (jax.jit(f)(*inputs) for f in (flash, attention))
    np.testing.assert_allclose(got, want, atol=1e-5)
