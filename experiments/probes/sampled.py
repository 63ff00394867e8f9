"""Probes that sample: completions of random prompts are to hold certain tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from purepost import Algorithm, algorithms
from purepost.filters import at_most
from purepost.losses import clipped, dppo_kl, off_policy_sequences, tis
from purepost.mean import LEVELS, Metrics, masked_mean
from purepost.models.containers import WithReference, with_reference
from purepost.models.critic import ActorCritic, actor_critic, one_trunk
from purepost.models.decoder import Decoder
from purepost.rollout.collect import Collect, Tasks, single_turn, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, pad_prompts

from .probe import CONFIG, Measure, Probe

GOAL, END, UNSCORED, TOKENS, GROUP = 6, 1, 2, 4, 4


def goal_share(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
    """The share of a completion's slots that hold GOAL or a later token: at best 1.

    A completion that begins with UNSCORED has no reward.
    """
    hits = (completions.tokens >= GOAL) & completions.mask
    share = hits.sum(-1).astype(jnp.float32) / TOKENS
    return jnp.where(completions.tokens[..., 0] == UNSCORED, jnp.nan, share), {}


def two_halves(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g 2"], Metrics]:
    """The same share as two rewards: of the first half of the slots, and of the second."""
    hits = ((completions.tokens >= GOAL) & completions.mask).astype(jnp.float32)
    return hits.reshape(*hits.shape[:2], 2, -1).sum(-1) / TOKENS, {}


DRAWN = Sampling(max_tokens=TOKENS, stop_ids=(END,))
COLLECT = single_turn(goal_share, DRAWN, group=GROUP)
APART = single_turn(two_halves, DRAWN, group=GROUP)
ONE = single_turn(goal_share, DRAWN, group=1)
GREEDY = single_turn(
    goal_share, Sampling(max_tokens=TOKENS, stop_ids=(END,), temperature=0.0), group=1
)


def tasks(seed: int, *, draws: int = 1) -> Callable[[int], Tasks]:
    """Four prompts of one to three random tokens every step, `draws` times."""

    def data(step: int) -> Tasks:
        rng = np.random.default_rng((seed, step))
        sizes = (3, 1, 2, 3) * draws
        prompts = [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in sizes]
        first = len(sizes) * step
        return Tasks(pad_prompts(prompts, ids=range(first, first + len(sizes)), width=3))

    return data


def mean_reward(models: Any, metrics: Metrics, data: Any) -> Float[Array, ""]:
    """Of the last step's completions."""
    return metrics["reward"].value


def best_reward(models: Any, metrics: Metrics, data: Any) -> Float[Array, ""]:
    """The best quarter's, of the last step's completions."""
    return metrics["reward/quantiles"].value[LEVELS.index(0.75)]


def policy(
    factory: str,
    build: Callable[..., Algorithm],
    *,
    lora: tuple[bool, ...] = (False, True),
    collect: tuple[Collect, ...] = (COLLECT,),
    draws: int = 1,
    measure: Measure = mean_reward,
    models: Callable[[Decoder], Any] = with_reference,
    **options: Any,
) -> Probe:
    """A factory that takes collectors behind its optimizer, on the share of hits."""

    def on_tasks(optimizer: optax.GradientTransformation, **more: Any) -> Algorithm:
        return build(optimizer, *collect, **more)

    def data(seed: int) -> Callable[[int], Tasks]:
        return tasks(seed, draws=draws)

    return Probe(
        factory, on_tasks, models, data, measure, "reward", 1.0, lora=lora, options=options
    )


def with_critic(
    factory: str,
    build: Callable[..., Algorithm],
    critic: Callable[[WithReference[Decoder]], ActorCritic] = actor_critic,
    **options: Any,
) -> Probe:
    """The same for one that trains a critic too."""

    def models(model: Decoder) -> ActorCritic:
        return critic(with_reference(model))

    return policy(factory, build, models=models, lora=(False,), **options)


ALL_TERMS: dict[str, Any] = {"beta": 0.02, "entropy": 0.001, "epochs": 2}
PER_ROW: dict[str, Any] = {
    "objective": clipped,
    "epochs": 2,
    "lay": partial(to_rows, per_row=2),
    "correction": off_policy_sequences(0.1),
    "filters": (at_most(TOKENS),),
}
DECOUPLED: dict[str, Any] = {"epochs": 2, "correction": tis(), "entropy": 0.001}
HEAD = partial(one_trunk, detached=True)


def preferred(
    tasks: Tasks, ours: Completions, theirs: Completions
) -> tuple[Float[Array, " p"], Metrics]:
    """The larger share of hits is preferred, equal ones are even."""
    (own, _), (other, _) = goal_share(tasks, ours), goal_share(tasks, theirs)
    metrics = {"reward": masked_mean(own, jnp.isfinite(own))}
    return (jnp.sign(own - other)[:, 0] + 1) / 2, metrics


def _nash_md(optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
    return algorithms.nash_md(optimizer, preferred, DRAWN, **options)


PROBES: dict[str, Probe] = {
    "grpo": policy("grpo", algorithms.grpo),
    "grpo with all terms": policy("grpo", algorithms.grpo, lora=(True,), **ALL_TERMS),
    "rloo": policy("rloo", algorithms.rloo),
    "rloo, clipped": policy("rloo", algorithms.rloo, lora=(False,), **PER_ROW),
    "dr_grpo": policy("dr_grpo", algorithms.dr_grpo, max_tokens=TOKENS),
    "reinforce": policy("reinforce", algorithms.reinforce, lora=(False,)),
    "reinforce_pp": policy("reinforce_pp", algorithms.reinforce_pp, lora=(True,), penalty=0.01),
    "remax": policy("remax", algorithms.remax, lora=(False,), collect=(COLLECT, GREEDY)),
    "dapo": policy("dapo", partial(algorithms.dapo, draws=2), lora=(True,), draws=2),
    "gspo": policy("gspo", algorithms.gspo, lora=(False,)),
    "gspo_token": policy("gspo_token", algorithms.gspo_token, lora=(True,)),
    "cispo": policy("cispo", algorithms.cispo, lora=(False,)),
    "sapo": policy("sapo", algorithms.sapo, lora=(True,)),
    "gmpo": policy("gmpo", algorithms.gmpo, lora=(False,)),
    "dppo": policy("dppo", algorithms.dppo, lora=(True,), divergence=dppo_kl),
    "vespo": policy("vespo", algorithms.vespo, lora=(False,)),
    "luspo": policy("luspo", algorithms.luspo, lora=(True,)),
    "gdpo": policy("gdpo", algorithms.gdpo, lora=(False,), collect=(APART,)),
    "opo": policy("opo", algorithms.opo, lora=(True,)),
    "max_rl": policy("max_rl", algorithms.max_rl, lora=(False,)),
    "pass_at_k": policy("pass_at_k", algorithms.pass_at_k, lora=(True,), measure=best_reward),
    "ppo": with_critic("ppo", algorithms.ppo, beta=0.01, target=1.0),
    "ppo on one trunk, decoupled": with_critic("ppo", algorithms.ppo, one_trunk, **DECOUPLED),
    "vapo, its critic a head": with_critic("vapo", algorithms.vapo, HEAD, alpha=1.0),
    "online_dpo": policy("online_dpo", algorithms.online_dpo, lora=(False,), beta=0.5),
    "xpo": policy("xpo", algorithms.xpo, lora=(True,), collect=(ONE,), beta=0.1, alpha=1e-3),
    "nash_md": policy("nash_md", _nash_md, lora=(False,), collect=(), beta=0.001),
}
