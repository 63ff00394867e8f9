"""Trees of arrays compared by name: to the bit, or closely."""

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from purepost.tree import named_leaves


def names_of(x: PyTree) -> dict[str, np.ndarray]:
    """Every array of a tree by its name, on the host."""
    return {name: np.asarray(a) for name, a in named_leaves(x) if eqx.is_array(a)}


def assert_same_bits(a: PyTree, b: PyTree) -> None:
    """Two trees hold the same names and the same bits."""
    one, two = names_of(a), names_of(b)
    assert one.keys() == two.keys()
    different = [n for n in one if one[n].tobytes() != two[n].tobytes()]
    assert not different, f"bits differ in {different}"


def assert_close(a: PyTree, b: PyTree, *, relative: float = 1e-5) -> None:
    """No array differs by more than `relative` of its own largest entry (of the tree's largest,
    for what is as small as rounding).
    """
    one, two = names_of(a), names_of(b)
    assert one.keys() == two.keys()
    top = max(np.abs(x).max(initial=0.0) for x in two.values())
    for name, x in one.items():
        scale = max(np.abs(two[name]).max(initial=0.0), 1e-2 * top)
        error = np.abs(x - two[name]).max(initial=0.0)
        assert np.isfinite(x).all() and error <= relative * scale, f"{name}: {error} of {scale}"
