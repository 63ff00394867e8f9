"""The order of the data: a function of seed and step, one shape, every row once an epoch."""

import subprocess
import sys

import numpy as np
import pytest

from purepost.data import hash_of, shuffled


def test_every_row_once_an_epoch_in_another_order_each_time() -> None:
    order = shuffled(10, 2, seed=3)
    epochs = [np.concatenate([order(5 * e + i).rows for i in range(5)]) for e in range(4)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(10))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [order(step).epoch for step in (0, 4, 5, 10)] == [0, 0, 1, 2]


def test_a_step_is_the_same_whatever_was_asked_before() -> None:
    straight = [shuffled(10, 3, seed=1)(step) for step in range(12)]
    jumping = shuffled(10, 3, seed=1)
    for step in (11, 0, 5, 4, 11, 3):
        np.testing.assert_array_equal(jumping(step).rows, straight[step].rows)
    other = np.concatenate([shuffled(10, 3, seed=2)(step).rows for step in range(4)])
    assert not np.array_equal(other, np.concatenate([draw.rows for draw in straight[:4]]))


def test_incomplete_batches_are_filled_up() -> None:
    order = shuffled(10, 4, seed=0)
    draws = [order(step) for step in range(3)]
    assert [draw.rows.shape for draw in draws] == [(4,)] * 3
    assert [draw.real.sum() for draw in draws] == [4, 4, 2]
    np.testing.assert_array_equal(draws[2].real, [True, True, False, False])
    real = np.concatenate([draw.rows[draw.real] for draw in draws])
    np.testing.assert_array_equal(np.sort(real), np.arange(10))
    small = shuffled(2, 4, seed=0)(7)
    assert small.epoch == 7 and small.real.sum() == 2


def test_in_order_when_asked() -> None:
    order = shuffled(5, 2, seed=0, shuffle=False)
    assert [order(step).rows[order(step).real].tolist() for step in range(4)] == [
        [0, 1],
        [2, 3],
        [4],
        [0, 1],
    ]


def test_permutations_are_uniform() -> None:
    counts = np.zeros((3, 3))
    for seed in range(600):
        counts[np.arange(3), shuffled(3, 3, seed=seed)(0).rows] += 1
    # Binomial(600, 1/3): standard deviation 11.5.
    assert np.abs(counts - 200).max() < 5 * 11.5


def test_the_order_is_the_same_in_every_process_and_version() -> None:
    """A changed order would break the resuming of every run: these numbers must stay."""
    assert shuffled(8, 8, seed=0)(0).rows.tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    code = "from purepost.data import shuffled; print(shuffled(8, 8, seed=0)(0).rows.tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[0, 3, 7, 5, 1, 2, 6, 4]"


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="dataset with rows, got none"):
        shuffled(0, 2, seed=0)
    with pytest.raises(ValueError, match="batch ≥ 1, got 0"):
        shuffled(2, 0, seed=0)
    with pytest.raises(ValueError, match="step ≥ 0, got -1"):
        shuffled(2, 1, seed=0)(-1)


def test_hash_tells_rows_and_their_order() -> None:
    rows = [{"prompt": "é", "n": 1}, {"prompt": "b", "n": np.int64(2), "x": np.ones(2)}]
    same = [{"n": 1, "prompt": "é"}, {"x": [1.0, 1.0], "prompt": "b", "n": 2}]
    assert hash_of(rows) == hash_of(same)
    hashes = {hash_of(x) for x in (rows, rows[::-1], rows[:1], [], ["é"], [b"e"], ["ab"], "ab")}
    assert len(hashes) == 8
    with pytest.raises(TypeError, match="got object"):
        hash_of([object()])
