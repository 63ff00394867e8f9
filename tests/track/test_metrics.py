"""Metrics as floats; quantiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.mean import LEVELS, Mean, quantiles, scalar_mean
from purepost.track import to_floats


def test_floats_divide_once_and_leave_out_what_has_no_weight() -> None:
    f32 = jnp.float32
    metrics = {
        "a": Mean(jnp.asarray(10, f32), jnp.asarray(4, f32)),
        "none": Mean(jnp.asarray(0, f32), jnp.asarray(0, f32)),
        "vector": Mean(jnp.asarray([2, 4], f32), jnp.asarray(2, f32)),
        "partly": Mean(jnp.asarray([2, 9], f32), jnp.asarray([4, 0], f32)),
        "nan": scalar_mean(float("nan")),
    }
    record = to_floats(metrics)
    assert np.isnan(record.pop("nan"))
    assert record == {"a": 2.5, "vector": [1.0, 2.0], "partly": [0.5, 0.0]}
    assert isinstance(record["a"], float)


def test_quantiles_interpolate_and_ignore_the_masked() -> None:
    # 0..10 in an odd order: the quantile of level q is 10 q.
    x = jnp.asarray([[3, 99, 0, 10, 5, 7], [1, 2, 4, 6, 8, 9]], jnp.float32)
    mask = x != 99
    both = [quantiles(x, mask), jax.jit(quantiles)(x, mask)]
    for mean in both:
        np.testing.assert_allclose(mean.value, 10 * np.asarray(LEVELS), rtol=1e-6)
    np.testing.assert_allclose(quantiles(jnp.arange(11.0)).value, 10 * np.asarray(LEVELS), 1e-6)


def test_quantiles_of_nothing_have_no_weight() -> None:
    mean = quantiles(jnp.ones(3), jnp.zeros(3, bool))
    assert float(mean.weight) == 0
    assert to_floats({"x": mean}) == {}


def test_quantiles_of_whole_numbers() -> None:
    assert quantiles(jnp.asarray([1.0, 3.0])).value[3] == pytest.approx(2)
