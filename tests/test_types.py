"""Rows: what the makers promise, every law that the check knows, and rows made by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from purepost.tree import pad_rows
from purepost.types import Rows, causal_rows, check_rows, group_rows, num_rows


def ints(*x):
    return jnp.asarray(x, jnp.int32)


def plain() -> Rows:
    return causal_rows(ints([5, 6, 7, 0], [8, 9, 0, 0]), ints(3, 2))


def packed() -> Rows:
    """One row by hand: the documents [5 6 7] and [8 9], then padding."""
    return Rows(
        tokens=ints([5, 6, 7, 8, 9, 0]),
        end=ints([3, 3, 3, 5, 5, 6]),
        positions=ints([0, 1, 2, 0, 1, 0]),
        parent=ints([0, 0, 1, 3, 3, 5]),
        mask=jnp.asarray([[0, 1, 1, 0, 1, 0]], bool),
        episode=ints([0, 0, 0, 1, 1, 0]),
        ids=ints(0),
        episodes=2,
    )


def grouped() -> Rows:
    return group_rows(
        prompts=ints([3, 4, 0], [5, 0, 0]),
        prompt_lengths=ints(2, 1),
        branches=ints([[6, 7], [8, 0]], [[9, 0], [0, 0]]),
        branch_lengths=ints([2, 1], [1, 0]),
        mask=jnp.ones((2, 2, 2), bool),
    )


def seen_by(rows: Rows, row: int, i: int) -> set[int]:
    """The tokens that token i sees, by the law alone."""
    end = np.asarray(rows.end[row])
    return {j for j in range(i + 1) if i < end[j] or i == j}


def changed(rows: Rows, name: str, place: tuple[int, int], value: int) -> Rows:
    """The rows with one entry of a field set."""
    old = {"end": rows.end, "parent": rows.parent, "positions": rows.positions, "mask": rows.mask}
    return dataclasses.replace(rows, **{name: old[name].at[place].set(value)})


@pytest.mark.parametrize("make", [plain, packed, grouped])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_keep_the_laws_with_rows_of_zeros_too(make, padded):
    rows = make()
    check_rows(pad_rows(rows, 5) if padded else rows)


def test_plain_sequences():
    rows = plain()
    np.testing.assert_array_equal(rows.end, [[3, 3, 3, 4], [2, 2, 3, 4]])
    np.testing.assert_array_equal(rows.parent, [[0, 0, 1, 3], [0, 0, 2, 3]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(rows.mask, [[0, 1, 1, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(rows.ids, [0, 1])
    assert seen_by(rows, 0, 2) == {0, 1, 2}
    assert seen_by(rows, 0, 3) == {3}


def test_a_mask_never_trains_a_root_or_padding():
    rows = causal_rows(ints([5, 6, 0]), ints(2), jnp.ones((1, 3), bool), ids=ints(9), capacity=1)
    np.testing.assert_array_equal(rows.mask, [[0, 1, 0]])
    assert rows.ids.tolist() == [9]
    assert rows.most_trained == 1


def test_branches_continue_from_the_last_token_of_their_prompt():
    rows = grouped()
    assert rows.tokens.shape == (2, 3 + 2 * 2)
    assert rows.parent[0, 3] == rows.parent[0, 5] == 1  # prompt of 2
    assert rows.parent[1, 3] == 0  # prompt of 1
    assert rows.parent[0, 4] == 3
    np.testing.assert_array_equal(rows.positions[0], [0, 1, 0, 2, 3, 2, 0])
    np.testing.assert_array_equal(rows.mask, [[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(rows.episode[0], [0, 0, 0, 0, 0, 1, 1])
    assert (rows.most_trained, rows.episodes) == (4, 2)


def test_branches_see_their_prompt_and_themselves_only():
    rows = grouped()
    assert seen_by(rows, 0, 4) == {0, 1, 3, 4}
    assert seen_by(rows, 0, 5) == {0, 1, 5}
    assert seen_by(rows, 0, 2) == {0, 1, 2}  # padding of the prompt: sees, and is seen by nobody
    assert all(2 not in seen_by(rows, 0, i) for i in range(3, 7))
    assert seen_by(rows, 1, 3) == {0, 3}


def test_packed_documents_do_not_see_each_other():
    rows = packed()
    assert seen_by(rows, 0, 4) == {3, 4}
    assert seen_by(rows, 0, 2) == {0, 1, 2}
    assert seen_by(rows, 0, 5) == {5}


@pytest.mark.parametrize(
    ("name", "place", "value", "law"),
    [
        ("end", (0, 1), 1, r"end\[i\] ≥ i\+1"),
        ("end", (0, 0), 7, "≤ the row's length"),
        ("parent", (0, 1), 2, r"parent\[i\] ≤ i"),
        ("parent", (0, 1), -1, r"parent\[i\] ≤ i"),
        ("mask", (0, 3), True, "a root is not trained"),
        ("mask", (0, 5), True, "a root is not trained"),
        ("end", (0, 1), 4, "a child lies in its parent's subtree"),
        ("parent", (0, 4), 2, "a child lies in its parent's subtree"),
        ("positions", (0, 2), 3, r"positions\[i\] = positions\[parent\[i\]\] \+ 1"),
        ("positions", (0, 4), 4, r"positions\[i\] = positions\[parent\[i\]\] \+ 1"),
    ],
)
def test_every_broken_law_is_reported(name, place, value, law):
    with pytest.raises(ValueError, match=rf"{law}.* in row 0"):
        check_rows(changed(packed(), name, place, value))


def test_more_trained_tokens_than_the_capacity_are_reported():
    with pytest.raises(ValueError, match="at most `capacity` trained tokens” in row 0"):
        check_rows(dataclasses.replace(packed(), capacity=2))


def test_the_row_of_the_fault_is_named():
    rows = plain()
    with pytest.raises(ValueError, match=r"in row 1, token \[1\]"):
        check_rows(changed(rows, "positions", (1, 1), 5))


def test_the_number_of_rows_is_that_of_all_arrays():
    assert num_rows(plain()) == 2
    with pytest.raises(ValueError, match="share one leading axis"):
        num_rows({"a": jnp.zeros(2), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match="share one leading axis"):
        num_rows({"a": jnp.zeros(()), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match="share one leading axis"):
        num_rows({})
