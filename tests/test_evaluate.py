"""pass@k, intervals, and tests of a difference, against values known from elsewhere."""

from itertools import combinations

import numpy as np
import pytest

from purepost.evaluate import (
    Interval,
    McNemar,
    bootstrap,
    mcnemar,
    paired_difference,
    pass_at_k,
    wilson,
)


def test_pass_at_k_counts_subsets() -> None:
    # Of 5 answers 2 are right: among all subsets of k answers, those that hold a right one.
    for k in range(1, 6):
        subsets = list(combinations([1, 1, 0, 0, 0], k))
        share = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(np.array([5]), np.array([2]), k)[0] == pytest.approx(share)
    assert pass_at_k(np.array([5]), np.array([2]), 2)[0] == pytest.approx(0.7)


def test_pass_at_k_per_problem_and_for_many_samples() -> None:
    values = pass_at_k(np.array([4, 10, 1000]), np.array([0, 10, 1]), 4)
    np.testing.assert_allclose(values, [0, 1, 4 / 1000])


def test_pass_at_k_is_unbiased() -> None:
    # p = .3, k = 3: the truth is 1 − .7³ = .657, whatever the number of samples.
    rng = np.random.default_rng(0)
    correct = rng.binomial(8, 0.3, 40_000)
    values = pass_at_k(np.full(40_000, 8), correct, 3)
    assert values.mean() == pytest.approx(0.657, abs=4 * values.std() / 200)


def test_pass_at_k_needs_enough_samples() -> None:
    with pytest.raises(ValueError, match="got k 5 and 4 answers"):
        pass_at_k(np.array([8, 4]), np.array([1, 1]), 5)
    with pytest.raises(ValueError, match="0 ≤ correct ≤ samples"):
        pass_at_k(np.array([4]), np.array([5]), 1)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    # Tables of Wilson's interval at 95 %; 0 of n ends at z²/(n + z²) = 3.8415/13.8415.
    [(8, 10, 0.4902, 0.9433), (0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (50, 100, 0.4038, 0.5962)],
)
def test_wilson(correct, n, low, high) -> None:
    interval = wilson(correct, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert interval.value == correct / n and interval.n == n


def test_wilson_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    counts = rng.binomial(200, 0.17, 2000).tolist()
    covered = np.mean([(i := wilson(c, 200)).low <= 0.17 <= i.high for c in counts])
    assert 0.93 < covered < 0.97
    assert wilson(20, 40, confidence=0.5).low > wilson(20, 40).low


def test_bootstrap_agrees_with_the_normal_interval_for_many_problems() -> None:
    scores = np.random.default_rng(2).normal(1, 2, 2500)
    interval = bootstrap(scores, resamples=4000)
    half = 1.959964 * scores.std() / 50
    assert interval.value == pytest.approx(scores.mean())
    assert interval.low == pytest.approx(scores.mean() - half, abs=0.06 * half)
    assert interval.high == pytest.approx(scores.mean() + half, abs=0.06 * half)
    assert bootstrap(scores, resamples=4000) == interval


def test_pairing_leaves_out_what_the_problems_differ_in() -> None:
    before = np.linspace(-50, 50, 40)
    interval = paired_difference(before, before + 0.25)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.25, 0.25, 0.25))
    assert interval.n == 40


def test_mcnemar_exact() -> None:
    # 8 gained, 1 lost: 2 (C(9,0) + C(9,1)) / 2⁹ = 20/512.
    before = np.array([False] * 8 + [True] + [True] * 5 + [False] * 6)
    after = np.array([True] * 8 + [False] + [True] * 5 + [False] * 6)
    assert mcnemar(before, after) == McNemar(8, 1, 20 / 512)
    assert mcnemar(after, before) == McNemar(1, 8, 20 / 512)
    assert mcnemar(before, before) == McNemar(0, 0, 1.0)
    assert mcnemar(np.array([True, False]), np.array([False, True])).p_value == 1.0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="0 < confidence < 1, got 95"):
        wilson(1, 2, confidence=95.0)
    with pytest.raises(ValueError, match="at least one score"):
        bootstrap(np.array([]))
    with pytest.raises(ValueError, match="all of them finite"):
        bootstrap(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="resamples ≥ 1"):
        bootstrap(np.array([1.0]), resamples=0)


def test_prints_short() -> None:
    assert str(Interval(0.48, 0.411, 0.5496, 200)) == "0.480 [0.411, 0.550]"
