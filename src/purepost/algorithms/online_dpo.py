"""Online DPO: the policy's own completions, ranked by a reward.

y_c, y_r = the better and the worse of completions of π
L = −log σ(β(log π(y_c)/π_ref(y_c) − log π(y_r)/π_ref(y_r)))

Source: Guo et al., Direct Language Model Alignment from Online AI Feedback, 2402.04792, alg. 1.
Differs from the paper:
1. Of more than two completions the best and the worst are taken.
2. Completions of equal reward, and those without one, are no pair.
"""

from typing import Unpack

import jax.numpy as jnp
import optax

from ..algorithm import Algorithm, TrainState
from ..mean import Metrics, mean_of
from ..rollout.collect import Collect, Grouped, Tasks, episode_metrics
from ..rollout.labelled import best_and_worst
from ..types import KeyArray
from .dpo import Models, Options, PairBatch, dpo


def online_dpo(
    optimizer: optax.GradientTransformation, collect: Collect, **options: Unpack[Options]
) -> Algorithm[Models, Tasks, PairBatch]:
    """DPO on what `collect` samples, at least two completions of each prompt. Options are dpo's.
    Error: groups of one.
    """
    if isinstance(collect, Grouped) and collect.group < 2:
        raise ValueError("expected at least 2 completions of each prompt, got 1; raise `group`")
    offline = dpo(optimizer, **options)

    def rollout(key: KeyArray, state: TrainState[Models], data: Tasks) -> tuple[PairBatch, Metrics]:
        episodes, metrics = collect(key, state.models.policy, data)
        pairs, _ = best_and_worst(episodes)
        batch, more = offline.rollout(key, state, pairs)
        tied = {"frac_tied": mean_of(1.0 - pairs.real.astype(jnp.float32))}
        return batch, episode_metrics(episodes) | metrics | more | tied

    return Algorithm(offline.init, rollout, offline.loss, offline.update)
