"""A weight laid out in blocks multiplies as it did before."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.weights import Tiled, linear, shape_of, tile
from purepost.weights.linear import dense


@pytest.mark.parametrize(("out", "block"), [(576, 192), (192, 192), (256, 128), (40, 40), (33, 33)])
def test_products_are_the_same(out: int, block: int) -> None:
    """The largest block that divides the output features; leading axes stay."""
    rng = np.random.default_rng(0)
    raw, x = rng.normal(size=(6, out)), rng.normal(size=(2, 3, 6))
    w = tile(jnp.asarray(raw, jnp.float32))
    assert isinstance(w, Tiled)
    assert w.blocks.shape == (out // block, block, 6)
    assert shape_of(w) == (6, out)
    np.testing.assert_array_equal(dense(w), jnp.asarray(raw, jnp.float32))
    got = eqx.filter_jit(linear)(jnp.asarray(x, jnp.float32), w)
    np.testing.assert_allclose(got, x @ raw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out", [8, 31, 193, 199])
def test_a_width_without_blocks_stays(out: int) -> None:
    """Too narrow, or with no divisor from 32 to 192."""
    w = jnp.ones((6, out))
    assert tile(w) is w
