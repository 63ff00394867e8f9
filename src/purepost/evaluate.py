"""Evaluation: pass@k, and figures with their intervals, before and after.

A score without its interval is half a result. One answer a problem: a proportion, `wilson`. Several
answers a problem, or scores that are no proportion: `bootstrap` over the problems, for it is they
that are drawn at random. Two models on the same problems: `paired_difference` for the size of the
gain, `mcnemar` for its significance.
"""

from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval, over n problems."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class McNemar:
    """How many problems were gained and lost, and the exact two-sided p-value."""

    gained: int
    lost: int
    p_value: float


def pass_at_k(
    samples: Int[np.ndarray, " n"], correct: Int[np.ndarray, " n"], k: int
) -> Float[np.ndarray, " n"]:
    """The unbiased estimate, per problem, that one of k answers is right.

        pass@k = 1 − C(s − c, k) / C(s, k)       of s answers, c were right

    Averaged over the problems it is the benchmark's pass@k. Needs s ≥ k answers to every problem;
    fewer, or c outside 0…s, is a ValueError.

    Source: Chen et al., Evaluating Large Language Models Trained on Code, 2107.03374, eq. 1.
    """
    if not 1 <= k <= samples.min(initial=k):
        raise ValueError(
            f"expected 1 ≤ k ≤ the answers to each problem, got k {k} and "
            f"{samples.min(initial=k)} answers; sample more or lower k"
        )
    if ((correct < 0) | (correct > samples)).any():
        raise ValueError("expected 0 ≤ correct ≤ samples for every problem, got counts outside")
    pairs = zip(samples.tolist(), correct.tolist(), strict=True)
    return np.asarray([1 - comb(s - c, k) / comb(s, k) for s, c in pairs], np.float64)


def wilson(correct: int, n: int, *, confidence: float = 0.95) -> Interval:
    """A proportion with Wilson's score interval, right for few problems and near 0 and 1.

        (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson, Probable Inference, the Law of Succession, and Statistical Inference,
    JASA 22 (1927).
    """
    if n < 1 or not 0 <= correct <= n:
        raise ValueError(f"expected n ≥ 1 and 0 ≤ correct ≤ n, got {correct} of {n}")
    z = NormalDist().inv_cdf(0.5 + _checked(confidence) / 2)
    p = correct / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(p, max(min(middle - half, p), 0.0), min(max(middle + half, p), 1.0), n)


def bootstrap(
    scores: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The mean of one score a problem with its percentile bootstrap interval over the problems.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13.
    """
    n = len(scores)
    if n < 1 or not np.isfinite(scores).all():
        raise ValueError(f"expected at least one score, all of them finite, got {scores}")
    if resamples < 1:
        raise ValueError(f"expected resamples ≥ 1, got {resamples}")
    rng = np.random.Generator(np.random.Philox(seed))
    means = np.empty(resamples)
    chunk = max(1, 4_000_000 // n)  # bounds the memory of the drawn indices
    for start in range(0, resamples, chunk):
        count = min(chunk, resamples - start)
        means[start : start + count] = scores[rng.integers(0, n, (count, n))].mean(1)
    tail = (1 - _checked(confidence)) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(scores.mean()), float(low), float(high), n)


def paired_difference(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The mean of after − before on the same problems, with its bootstrap interval.

    Pairing leaves out what the problems differ in, so it is far narrower than two intervals.
    """
    difference = after.astype(np.float64) - before.astype(np.float64)
    return bootstrap(difference, confidence=confidence, resamples=resamples, seed=seed)


def mcnemar(before: Bool[np.ndarray, " n"], after: Bool[np.ndarray, " n"]) -> McNemar:
    """McNemar's exact test that two models solve equally many of the same problems.

        p = min(1, 2 P(X ≤ min(gained, lost))),  X ~ Binomial(gained + lost, ½)

    Source: McNemar, Note on the Sampling Error of the Difference between Correlated Proportions,
    Psychometrika 12 (1947); its exact form by the binomial distribution.
    """
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    n = gained + lost
    tail = sum(comb(n, i) for i in range(min(gained, lost) + 1))
    return McNemar(gained, lost, min(1.0, 2 * tail / 2**n))


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"expected 0 < confidence < 1, got {confidence}; 0.95 is usual")
    return confidence
