"""Rotary positions: rotation, and frequencies against worked values and transformers' own."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from purepost.models.fields import rope_of, rope_to_hf
from purepost.models.rope import (
    KINDS,
    Rope,
    RopeScaling,
    rope_angles,
    rope_frequencies,
    rotate,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def test_rotation_by_position_and_frequency() -> None:
    cos, sin = rope_angles(jnp.asarray([1], jnp.int32), np.array([1.0, 1.0], np.float32))
    got = rotate(jnp.asarray([[[1.0, 0.0, 0.0, 0.0]]]), cos, sin)
    np.testing.assert_allclose(got[0, 0], [0.540302, 0, 0.841471, 0], atol=1e-6)


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.float32) for _ in range(2))
    frequencies = rope_frequencies(8, 100.0)

    def product(i: int, j: int) -> float:
        a, b = (rope_angles(jnp.asarray([n], jnp.int32), frequencies) for n in (i, j))
        return float((rotate(q, a[0], a[1]) * rotate(k, b[0], b[1])).sum())

    assert product(37, 30) == pytest.approx(product(7, 0), rel=1e-5)
    assert product(37, 30) != pytest.approx(product(38, 30), rel=1e-3)


def test_plain_and_linear_frequencies() -> None:
    want = [1.0, 1 / 10, 1 / 100, 1 / 1000]  # 10000^(−2i/8)
    np.testing.assert_allclose(rope_frequencies(8, 10000.0), want, rtol=1e-6)
    stretched = rope_frequencies(8, 10000.0, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(stretched, np.array(want) / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("wavelength", "factor"), [(1024.0, 1.0), (4096.0, 0.416667), (16384.0, 0.125)]
)
def test_llama3_scaling_by_wavelength(wavelength: float, factor: float) -> None:
    """With width 4 the second frequency is θ^(−1/2): θ = (wavelength / 2π)²."""
    theta = (wavelength / (2 * np.pi)) ** 2
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = rope_frequencies(4, theta), rope_frequencies(4, theta, scaling)
    assert 2 * np.pi / plain[1] == pytest.approx(wavelength, rel=1e-6)
    assert scaled[1] / plain[1] == pytest.approx(factor, rel=2e-6)


def test_frequencies_and_factors_equal_transformers() -> None:
    rows = json.loads((GOLDEN / "rope.json").read_text(encoding="utf-8"))
    assert {row["parameters"]["rope_type"] for row in rows} == set(KINDS)
    for row in rows:
        theta, scaling = rope_of(row["parameters"], 10000.0, row["positions"])
        assert scaling is not None
        got = rope_frequencies(32, theta, scaling, row["length"])
        np.testing.assert_allclose(got, row["frequencies"], rtol=3e-6, err_msg=str(row))
        assert scaling.attention_factor == pytest.approx(row["factor"], rel=1e-7)
        again = rope_of(rope_to_hf(theta, scaling), 1e4, row["positions"])
        assert again == (theta, scaling)


def test_the_attention_factor_scales_cosine_and_sine() -> None:
    plain = Rope(np.array([0.5], np.float32), 1.0)
    cos, sin = plain._replace(scale=1.5).angles(jnp.asarray([2], jnp.int32))
    np.testing.assert_allclose([cos[0, 0], sin[0, 0]], 1.5 * np.array([np.cos(1), np.sin(1)]))


def test_dynamic_stretching_begins_past_the_trained_positions() -> None:
    """At twice the trained length and factor 2 the base grows 3^(8/6)-fold."""
    scaling = RopeScaling("dynamic", 2.0, original_max_positions=100)
    np.testing.assert_array_equal(rope_frequencies(8, 1e4, scaling, 100), rope_frequencies(8, 1e4))
    want = rope_frequencies(8, 1e4 * 3 ** (8 / 6))
    np.testing.assert_allclose(rope_frequencies(8, 1e4, scaling, 200), want, rtol=1e-6)


def test_an_unknown_scaling_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="linear, dynamic, llama3, yarn, proportional, got 'longrope'"
    ):
        RopeScaling("longrope", 2.0)
    with pytest.raises(ValueError, match="factor above 0, got -1"):
        RopeScaling("linear", -1.0)
    with pytest.raises(ValueError, match="low_freq_factor below high_freq_factor"):
        RopeScaling("llama3", 2.0, 4.0, 4.0)
    cases = [
        (
            {"rope_type": "longrope"},
            "default, linear, dynamic, llama3, yarn, proportional, got 'longrope'",
        ),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, r"type linear, got also {'beta': 1}"),
        ({"rope_type": "yarn"}, "type yarn: expected factor in config.json to be a number"),
        ({"rope_theta": 1.0}, "rope_theta in config.json to be above 1"),
        ({"partial_rotary_factor": 0.5}, "got also {'partial_rotary_factor': 0.5}"),
    ]
    for parameters, message in cases:
        with pytest.raises(ValueError, match=message):
            rope_of(parameters, 1e4, 100)
