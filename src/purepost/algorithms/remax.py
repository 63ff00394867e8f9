"""ReMax: REINFORCE with the reward of the greedy completion as the baseline.

A_i = r_i − r(greedy completion of the same prompt)
L   = −Σ_i A_i Σ_t log π(y_it) / B

Source: Li et al., ReMax, 2310.10505. Differs from the paper: a KL penalty, if wanted, is a term of
the loss (`beta`), not part of the reward.
"""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
import jax.random as jr
import optax

from ..advantages import over_baseline
from ..algorithm import Algorithm
from ..losses import reinforce, sequence_sum
from ..mean import Metrics
from ..models.decoder import Decoder
from ..rollout.collect import Collect, Episodes, Tasks
from ..types import KeyArray
from .grpo import Models, Options, PolicyBatch, grpo


def remax(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    greedy: Collect,
    **options: Unpack[Options],
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """REINFORCE over the episodes of `collect`; `greedy` collects the one completion per prompt
    that they are compared with: `single_turn(reward, Sampling(temperature=0.0, ...), group=1)`.
    Options are grpo's.
    """

    def both(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        k_sampled, k_greedy = jr.split(key)
        episodes, metrics = collect(k_sampled, model, tasks)
        compared, _ = greedy(k_greedy, model, tasks)
        by_prompt = jnp.full(tasks.prompts.lengths.shape, jnp.nan)
        by_prompt = by_prompt.at[compared.group].set(compared.rewards)
        return dataclasses.replace(episodes, baselines=by_prompt[episodes.group]), metrics

    parts: Options = {
        "advantage": over_baseline,
        "objective": reinforce,
        "aggregate": sequence_sum,
    }
    return grpo(optimizer, both, **(parts | options))
