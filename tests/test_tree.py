"""Names of leaves, keys by name, strided splits, padding, counts, copies."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array, Float

from purepost import tree


class Layer(eqx.Module):
    """Two leaves."""

    q: Float[Array, " i"]
    k: Float[Array, " i"] | None


MODEL = {"layers": [Layer(jnp.ones(2), None), Layer(jnp.ones(3), jnp.ones(1))], "n": jnp.ones(4)}


def test_names_join_attributes_keys_and_indices():
    names = [name for name, _ in tree.named_leaves(MODEL)]
    assert names == ["layers.0.q", "layers.1.q", "layers.1.k", "n"]


def test_map_named_is_told_the_name():
    named = tree.map_named(lambda name, x: name, MODEL)
    assert jax.tree.leaves(named) == [name for name, _ in tree.named_leaves(MODEL)]


def test_a_pattern_is_searched_in_names():
    assert tree.matching(MODEL, r"\.q$") == ["layers.0.q", "layers.1.q"]


def test_a_pattern_that_matches_nothing_lists_the_names():
    with pytest.raises(ValueError, match=r"where='absent'.*none of: layers\.0\.q, .*, n$"):
        tree.matching(MODEL, "absent")


def test_a_key_by_name_does_not_depend_on_the_rest_of_the_tree():
    key = jr.key(0)
    data = [jr.key_data(tree.named_key(key, name)).tolist() for name in ("a", "b", "a")]
    assert data[0] == data[2] != data[1]


def test_splits_are_strided():
    parts = tree.split_rows({"x": jnp.arange(6), "y": jnp.arange(12).reshape(6, 2)}, 3)
    np.testing.assert_array_equal(parts["x"], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(parts["y"][1], [[2, 3], [8, 9]])


def test_a_split_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="batch of 5 rows is not divisible into 2 parts"):
        tree.split_rows(jnp.arange(5), 2)


def test_padding_appends_zeros_and_keeps_dtypes():
    batch = {"x": jnp.ones((5, 2), jnp.int32), "m": jnp.ones(5, bool)}
    padded = tree.pad_rows(batch, 4)
    assert padded["x"].shape == (8, 2) and padded["x"].dtype == jnp.int32
    assert padded["m"].dtype == bool
    assert not padded["x"][5:].any() and not padded["m"][5:].any()
    np.testing.assert_array_equal(padded["x"][:5], batch["x"])
    assert tree.pad_rows(batch, 5) is batch


def test_count_counts_numbers_in_arrays():
    assert tree.count(MODEL) == 2 + 3 + 1 + 4
    assert tree.count({"name": "x", "a": jnp.ones((2, 3))}) == 6


def test_a_copy_shares_no_buffer():
    old = {"a": jnp.arange(3), "n": None, "s": "text"}
    new = tree.copy(old)
    old["a"].delete()
    np.testing.assert_array_equal(new["a"], [0, 1, 2])
    assert new["n"] is None and new["s"] == "text"
