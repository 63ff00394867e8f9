"""A row's side depends on what it holds; mixtures hold every row as often as its weight says."""

from collections import Counter

import numpy as np
import pytest

from purepost.data import mix, read, split

ROWS = [{"text": f"row {i}"} for i in range(1000)]


def texts(records) -> list[str]:
    return [row["text"] for row in records]


def test_sides_do_not_depend_on_place_or_company() -> None:
    train, held_out = split(read(ROWS), 0.1)
    assert sorted(texts(train) + texts(held_out)) == sorted(texts(ROWS))
    # Binomial(1000, .1): standard deviation 9.5.
    assert abs(len(held_out) - 100) < 4 * 9.5
    out = set(texts(held_out))
    assert texts(held_out) == [text for text in texts(ROWS) if text in out]
    more = [{"text": "new"}, *ROWS[::-1], {"text": "another"}]
    _, again = split(read(more), 0.1)
    assert out == set(texts(again)) - {"new", "another"}


def test_equal_rows_stay_together_and_seeds_differ() -> None:
    train, held_out = split(read(ROWS + ROWS), 0.3)
    assert not set(texts(train)) & set(texts(held_out))
    _, other = split(read(ROWS), 0.3, seed=1)
    both = set(texts(other)) & set(texts(held_out))
    assert 0.2 < len(both) / len(other) < 0.4


def test_the_split_is_the_same_in_every_version() -> None:
    """A changed split would put rows that were trained on among the held-out ones."""
    _, held_out = split(read(ROWS[:20]), 0.2)
    assert texts(held_out) == ["row 8", "row 10", "row 15", "row 16", "row 18"]


def test_mixtures_hold_rows_as_often_as_their_weights_say() -> None:
    b = ROWS
    small = read([{"text": f"a {i}"} for i in range(400)])
    counts = Counter(texts(mix((small, 2.5), (read(b), 0.5))))
    of_small = np.asarray([counts[text] for text in texts(small)])
    of_large = np.asarray([counts[text] for text in texts(b)])
    assert set(of_small) == {2, 3} and set(of_large) == {0, 1}
    # Binomial(400, .5) and Binomial(1000, .5): standard deviations 10 and 16.
    assert abs(of_small.sum() - 1000) < 40 and abs(of_large.sum() - 500) < 64
    assert texts(mix((small, 1))) == texts(small)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        split(read(ROWS), 1.0)
    with pytest.raises(ValueError, match="rows on both sides, got 1 and 0"):
        split(read(ROWS[:1]), 0.001)
    with pytest.raises(ValueError, match="weights > 0, got 0"):
        mix((read(ROWS), 0))
    with pytest.raises(ValueError, match="rows in the mixture, got none"):
        mix()
