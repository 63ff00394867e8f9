"""What the contract is tested on: a tiny model, and for every factory a task whose optimum is
known.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float
from tests.probe import Probe

from purepost import Algorithm, algorithms
from purepost.algorithms.self_distillation import Views
from purepost.combine import Part, combine, over
from purepost.filters import at_most
from purepost.losses import clipped, dppo_kl, off_policy_sequences, preference, tis
from purepost.mean import LEVELS, Metrics, masked_mean
from purepost.models.containers import Distill, WithReference, with_reference
from purepost.models.critic import ActorCritic, actor_critic, one_trunk
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.models.heads import reward_model, value_model
from purepost.models.neftune import Neftune
from purepost.rollout.collect import Collect, Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, pad_prompts
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows
from purepost.weights import add_lora, int8, quantize
from tests import distillations, games, preferences

GOAL, END, UNSCORED, TOKENS, GROUP = 6, 1, 2, 4, 4

CONFIG = Config(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    tie_embeddings=False,
)
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "dropout": 0.1}


def tiny(*, lora: bool, seed: int = 0) -> Decoder:
    """A decoder whose frozen head is wide enough for adapters alone to make it certain."""
    model = init_decoder(jr.key(seed), CONFIG)
    model = eqx.tree_at(lambda m: m.head, model, replace_fn=lambda head: 2 * head)
    return add_lora(model, **LORA, key=jr.key(seed + 1)) if lora else model


def goal_share(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
    """The share of a completion's slots that hold GOAL or a later token: at best 1.

    A completion that begins with UNSCORED has no reward.
    """
    hits = (completions.tokens >= GOAL) & completions.mask
    share = hits.sum(-1).astype(jnp.float32) / TOKENS
    return jnp.where(completions.tokens[..., 0] == UNSCORED, jnp.nan, share), {}


COLLECT = single_turn(goal_share, Sampling(max_tokens=TOKENS, stop_ids=(END,)), group=GROUP)


def two_halves(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g 2"], Metrics]:
    """The same share as two rewards: of the first half of the slots, and of the second."""
    hits = ((completions.tokens >= GOAL) & completions.mask).astype(jnp.float32)
    return hits.reshape(*hits.shape[:2], 2, -1).sum(-1) / TOKENS, {}


APART = single_turn(two_halves, Sampling(max_tokens=TOKENS, stop_ids=(END,)), group=GROUP)
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


def forked(seed: int) -> Callable[[int], Rows]:
    """Two sequences, twice each, that part after their first token: [r, a, c, e] and [r, b, e].

    The best a model can do is ln 2 at that token and 0 elsewhere: 4 ln 2 over 10 trained tokens.
    """
    r, a, b, c, e = np.random.default_rng(seed).permutation(CONFIG.vocab_size)[:5].tolist()

    def data(step: int) -> Rows:
        tokens = np.array([[r, a, c, e, 0], [r, b, e, 0, 0]] * 2, np.int32)
        lengths = jnp.asarray([4, 3, 4, 3], jnp.int32)
        ids = jnp.arange(4 * step, 4 * step + 4, dtype=jnp.int32)
        return causal_rows(jnp.asarray(tokens), lengths, ids=ids)

    return data


def reward_gap(models: Any, metrics: Metrics, data: Tasks) -> float:
    """How far the last step's reward is from 1."""
    return 1.0 - float(metrics["reward"].value)


def best_gap(models: Any, metrics: Metrics, data: Tasks) -> float:
    """How far the best quarter of the last step's rewards is from 1."""
    return 1.0 - float(metrics["reward/quantiles"].value[LEVELS.index(0.75)])


def nll_gap(models: Decoder, metrics: Metrics, data: Rows) -> float:
    """How far the loss, in nats per token and without dropout, is from its least value."""
    logps = score(models, data).logps
    return float(-logps.sum() / data.mask.sum(dtype=jnp.float32)) - 0.4 * np.log(2)


def _policy(
    factory: str,
    build: Callable[..., Algorithm],
    *,
    lora: tuple[bool, ...] = (False, True),
    collect: tuple[Collect, ...] = (COLLECT,),
    draws: int = 1,
    gap: Callable[[Any, Metrics, Any], float] = reward_gap,
    **options: Any,
) -> Probe:
    def on_tasks(optimizer: optax.GradientTransformation, **more: Any) -> Algorithm:
        return build(optimizer, *collect, **more)

    def data(seed: int) -> Callable[[int], Tasks]:
        return tasks(seed, draws=draws)

    return Probe(factory, on_tasks, with_reference, data, gap, lora=lora, options=options)


def _with_critic(
    factory: str,
    build: Callable[..., Algorithm],
    critic: Callable[[WithReference[Decoder]], ActorCritic] = actor_critic,
    **options: Any,
) -> Probe:
    def on_tasks(optimizer: optax.GradientTransformation, **more: Any) -> Algorithm:
        return build(optimizer, COLLECT, **more)

    def models(model: Decoder) -> ActorCritic:
        return critic(with_reference(model))

    return Probe(factory, on_tasks, models, tasks, reward_gap, lora=(False,), options=options)


ALL_TERMS: dict[str, Any] = {"beta": 0.02, "entropy": 0.001, "epochs": 2}
PER_ROW: dict[str, Any] = {
    "objective": clipped,
    "epochs": 2,
    "per_row": 2,
    "correction": off_policy_sequences(0.1),
    "filters": (at_most(TOKENS),),
}

DECOUPLED: dict[str, Any] = {"epochs": 2, "correction": tis(), "entropy": 0.001}
HEAD = partial(one_trunk, detached=True)

PROBES: dict[str, Probe] = {
    "sft": Probe("sft", algorithms.sft, lambda model: model, forked, nll_gap, samples=False),
    "grpo": _policy("grpo", algorithms.grpo),
    "grpo with all terms": _policy("grpo", algorithms.grpo, lora=(True,), **ALL_TERMS),
    "rloo": _policy("rloo", algorithms.rloo),
    "rloo, clipped": _policy("rloo", algorithms.rloo, lora=(False,), **PER_ROW),
    "dr_grpo": _policy("dr_grpo", algorithms.dr_grpo, max_tokens=TOKENS),
    "reinforce": _policy("reinforce", algorithms.reinforce, lora=(False,)),
    "reinforce_pp": _policy("reinforce_pp", algorithms.reinforce_pp, lora=(True,), penalty=0.01),
    "remax": _policy("remax", algorithms.remax, lora=(False,), collect=(COLLECT, GREEDY)),
    "dapo": _policy("dapo", partial(algorithms.dapo, draws=2), lora=(True,), draws=2),
    "gspo": _policy("gspo", algorithms.gspo, lora=(False,)),
    "gspo_token": _policy("gspo_token", algorithms.gspo_token, lora=(True,)),
    "cispo": _policy("cispo", algorithms.cispo, lora=(False,)),
    "sapo": _policy("sapo", algorithms.sapo, lora=(True,)),
    "gmpo": _policy("gmpo", algorithms.gmpo, lora=(False,)),
    "dppo": _policy("dppo", algorithms.dppo, lora=(True,), divergence=dppo_kl),
    "vespo": _policy("vespo", algorithms.vespo, lora=(False,)),
    "luspo": _policy("luspo", algorithms.luspo, lora=(True,)),
    "gdpo": _policy("gdpo", algorithms.gdpo, lora=(False,), collect=(APART,)),
    "opo": _policy("opo", algorithms.opo, lora=(True,)),
    "max_rl": _policy("max_rl", algorithms.max_rl, lora=(False,)),
    "pass_at_k": _policy("pass_at_k", algorithms.pass_at_k, lora=(True,), gap=best_gap),
    "ppo": _with_critic("ppo", algorithms.ppo, beta=0.01, target=1.0),
    "ppo on one trunk, decoupled": _with_critic("ppo", algorithms.ppo, one_trunk, **DECOUPLED),
    "vapo, its critic a head": _with_critic("vapo", algorithms.vapo, HEAD),
}


def _paired(
    factory: str,
    build: Callable[..., Algorithm],
    *,
    gap: Callable[[Any, Metrics, Any], float] = preferences.loss_gap,
    lora: tuple[bool, ...] = (False,),
    data: Callable[[int], Callable[[int], Any]] = preferences.paired,
    models: Callable[[Decoder], Any] = with_reference,
    **options: Any,
) -> Probe:
    return Probe(factory, build, models, data, gap, samples=False, lora=lora, options=options)


NOISY: dict[str, Any] = {
    "loss": partial(preference.conservative, epsilon=preferences.WRONG),
    "beta": preferences.BETA,
}
MANY: dict[str, Any] = {
    "couple": preference.sorted_reference,
    "weigh": preference.wpo_weights,
    "beyond": 0.5,
    "nll": 0.1,
    "epochs": 2,
}
DRAWN = Sampling(max_tokens=TOKENS, stop_ids=(END,))
ONE = single_turn(goal_share, DRAWN, group=1)


def preferred(
    tasks: Tasks, ours: Completions, theirs: Completions
) -> tuple[Float[Array, " p"], Metrics]:
    """The larger share of hits is preferred, equal ones are even."""
    (own, _), (other, _) = goal_share(tasks, ours), goal_share(tasks, theirs)
    metrics = {"reward": masked_mean(own, jnp.isfinite(own))}
    return (jnp.sign(own - other)[:, 0] + 1) / 2, metrics


SMOOTH: dict[str, Any] = {"label_smoothing": preferences.WRONG, "z_loss": 1e-4}

PROBES |= {
    "dpo": _paired("dpo", algorithms.dpo, gap=preferences.noise_gap, lora=(False, True), **NOISY),
    "dpo, ipo": _paired("dpo", algorithms.dpo, beta=1.0, loss=preference.ipo),
    "dpo with all terms": _paired("dpo", algorithms.dpo, beta=1.0, **MANY),
    "orpo": _paired("orpo", algorithms.orpo),
    "simpo": _paired("simpo", algorithms.simpo, gamma=0.5),
    "cpo": _paired("cpo", algorithms.cpo, beta=0.5),
    "kto": _paired("kto", algorithms.kto, data=preferences.judged, beta=1.0),
    "sft, smoothed, on noise": _paired(
        "sft",
        algorithms.sft,
        gap=preferences.smooth_gap,
        data=preferences.told,
        models=partial(Neftune, alpha=0.1),
        **SMOOTH,
    ),
    "dft": _paired(
        "dft",
        algorithms.dft,
        gap=preferences.sure_gap,
        data=preferences.told,
        models=lambda model: model,
    ),
    "reward_model": _paired(
        "reward_model",
        algorithms.reward_model,
        models=partial(reward_model, jr.key(2)),
        centring=0.01,
    ),
    "process_reward_model": _paired(
        "process_reward_model",
        algorithms.process_reward_model,
        data=preferences.solved,
        models=value_model,
    ),
    "online_dpo": _policy("online_dpo", algorithms.online_dpo, lora=(False,), beta=0.5),
    "xpo": Probe(
        "xpo",
        lambda optimizer, **options: algorithms.xpo(optimizer, ONE, **options),
        with_reference,
        tasks,
        reward_gap,
        lora=(True,),
        options={"beta": 0.5, "alpha": 1e-3},
    ),
    "nash_md": Probe(
        "nash_md",
        lambda optimizer, **options: algorithms.nash_md(optimizer, preferred, DRAWN, **options),
        with_reference,
        tasks,
        reward_gap,
        lora=(False,),
        options={"beta": 0.001},
    ),
}


def _distilled(
    factory: str, build: Callable[..., Algorithm], data: Callable[[int], Callable[[int], Any]]
) -> Probe:
    gap = distillations.divergence_gap
    return Probe(factory, build, distillations.with_teacher, data, gap, lora=(False,))


PROBES |= {
    "logit_distillation": replace(
        _distilled("logit_distillation", algorithms.logit_distillation, distillations.rows),
        samples=False,
        options={"alpha": 1.0},
    ),
    "gkd": _distilled(
        "gkd",
        lambda optimizer, **options: algorithms.gkd(optimizer, DRAWN, **options),
        distillations.demonstrations(tasks),
    ),
    "sequence_distillation": _distilled(
        "sequence_distillation",
        lambda optimizer, **options: algorithms.sequence_distillation(
            optimizer, DRAWN, group=GROUP, **options
        ),
        distillations.prompts_of(tasks),
    ),
    "on_policy_distillation": _distilled(
        "on_policy_distillation",
        lambda optimizer, **options: algorithms.on_policy_distillation(
            optimizer, COLLECT, **options
        ),
        tasks,
    ),
}


def told(seed: int) -> Callable[[int], Views]:
    """The two forked sequences, read alike by student and teacher."""
    of = forked(seed)
    return lambda step: Views(of(step))


def student_gap(models: Distill[Decoder], metrics: Metrics, data: Views) -> float:
    """The student's loss, in nats per token, above its least value."""
    return nll_gap(models.student, metrics, data.rows)


def rewarded_and_taught(optimizer: optax.GradientTransformation, **options: Any) -> Algorithm:
    """GRPO of a student, with a little of its distillation."""
    rl = algorithms.grpo(optimizer, COLLECT, **options)
    far = algorithms.logit_distillation(optimizer, alpha=1.0)
    return combine(Part("rl", over(distillations.learner, rl)), Part("far", far, weight=0.05))


def tasks_and_rows(seed: int) -> Callable[[int], Any]:
    """Four prompts, and eight rows."""
    two = tasks(seed), distillations.rows(seed)
    return lambda step: tuple(of(step) for of in two)


PROBES |= distillations.PROBES | games.probes(tasks) | {
    "self_distillation": Probe(
        "self_distillation",
        algorithms.self_distillation,
        lambda model: Distill(model, model),
        told,
        student_gap,
        samples=False,
        lora=(True,),
        options={"decay": 0.5},
        still=lambda frozen: frozen.student,
    ),
    "combine: grpo and logit_distillation": Probe(
        "grpo",
        rewarded_and_taught,
        distillations.with_teacher,
        tasks_and_rows,
        lambda models, metrics, data: 1.0 - float(metrics["rl/reward"].value),
        lora=(False,),
    ),
}

# The same on frozen weights of four bits, or of eight: no algorithm knows.
PROBES |= {
    "sft on NF4": replace(PROBES["sft"], models=partial(quantize, block=8), lora=(True,)),
    "grpo on NF4": replace(
        PROBES["grpo"], models=lambda model: with_reference(quantize(model, block=8)), lora=(True,)
    ),
    "dpo on int8": replace(
        PROBES["dpo"], models=lambda model: with_reference(quantize(model, kind=int8)), lora=(True,)
    ),
}
