"""A tiny decoder whose heads, key heads and widths all differ, with random weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Config, Decoder, init_decoder


@pytest.fixture(scope="session")
def model() -> Decoder:
    """Two layers, four query and two key heads of width 6 on a stream of width 10."""
    config = Config(19, 10, 14, 2, 4, 2, 6, rope_theta=100.0, max_positions=64)
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), jnp.float32), shapes)
