"""What reward functions gave: totals, each function's part, what failed, and its metrics."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from ..mean import Mean, Metrics, quantiles, scalar_mean


@dataclass(frozen=True)
class Scores:
    """The rewards of n samples by f functions. NaN: unscored, or the function abstained."""

    rewards: Float[np.ndarray, " n"]  # float32, weighted sums over the functions
    per_function: Float[np.ndarray, "n f"]  # float32, unweighted
    names: tuple[str, ...]  # of the functions
    failures: dict[str, int]  # "function/raised|timed_out|not_finite" → samples it cost

    @property
    def scored(self) -> Bool[np.ndarray, " n"]:
        """Which samples have a reward."""
        return np.isfinite(self.rewards)

    def metrics(self, groups: Int[np.ndarray, " n"]) -> Metrics:
        """The field's usual metrics; `groups` says which prompt a sample answers.

        `reward_std` is the mean over groups of the sample standard deviation;
        `frac_reward_zero_std` the share of groups that teach nothing, their scored rewards being
        equal or fewer than two; `rewards/<function>/failures` counts samples.
        """
        values = self.rewards[self.scored]
        of = [
            self.rewards[(groups == group) & self.scored]
            for group in dict.fromkeys(groups.tolist())
        ]
        deviations = [x.std(ddof=1, dtype=np.float64) for x in of if len(x) > 1]
        flat = [len(x) < 2 or x.max() == x.min() for x in of]
        metrics = {
            "reward": _mean(values),
            "reward_std": _mean(np.asarray(deviations)),
            "frac_reward_zero_std": _mean(np.asarray(flat, np.float64)),
            "frac_unscored": _mean(1.0 - self.scored.astype(np.float64)),
            "reward/quantiles": quantiles(
                jnp.asarray(np.where(self.scored, self.rewards, 0.0), jnp.float32),
                jnp.asarray(self.scored),
            ),
        }
        for name, column in zip(self.names, self.per_function.T, strict=True):
            given = column[np.isfinite(column)]
            spread = [given.std(ddof=1, dtype=np.float64)] if len(given) > 1 else []
            failed = sum(n for key, n in self.failures.items() if key.rpartition("/")[0] == name)
            metrics |= {
                f"rewards/{name}/mean": _mean(given),
                f"rewards/{name}/std": _mean(np.asarray(spread)),
                f"rewards/{name}/failures": scalar_mean(float(failed)),
            }
        return metrics


def _mean(x: Float[np.ndarray, " n"]) -> Mean:
    total = np.sum(x, dtype=np.float64)
    return Mean(jnp.asarray(total, jnp.float32), jnp.asarray(len(x), jnp.float32))
