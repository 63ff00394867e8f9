"""Collecting episodes: prompts in, scored completions out, and the rows that train on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..mean import Metrics, masked_mean, mean_of, quantiles, scalar_mean
from ..models.decoder import Decoder
from ..types import KeyArray, Rows, group_rows
from .draw import Sampling
from .sample import LENGTH, Completions, Prompts, generate
from .stop import StopStrings


class Tasks(eqx.Module):
    """Prompts, and what a reward reads of each: arrays for a reward in JAX, lists for one in
    Python.
    """

    prompts: Prompts
    columns: dict[str, Any] = eqx.field(default_factory=dict)


class Episodes(eqx.Module):
    """n rollouts of p prompts.

    What follows the prompt is `tokens`; `mask` is True on what the policy sampled.
    """

    prompts: Prompts
    group: Int[Array, " n"]  # which prompt it continues
    tokens: Int[Array, "n t"]
    lengths: Int[Array, " n"]
    mask: Bool[Array, "n t"]
    logps: Float[Array, "n t"]  # the sampler's, at the sampling temperature, nats
    rewards: Float[Array, " n"]  # NaN: unscored
    finish: Int[Array, " n"]
    temperature: Float[Array, " n"]
    components: Float[Array, "n k"] | None = None  # the rewards that `rewards` is the sum of
    baselines: Float[Array, " n"] | None = None  # the reward of a rollout that is not trained on
    staleness: Int[Array, " n"] | None = None  # steps that the policy has trained since; None: 0
    # Of several turns: rewards at the last token of the turn that earned them, 0 elsewhere.
    step_rewards: Float[Array, "n t"] | None = None
    # Tokens before which the text begins anew behind the prompt, because a chat template rewrites
    # what came before; rewritten text is never sampled text.
    restarts: Bool[Array, "n t"] | None = None
    versions: Int[Array, "n t"] | None = None  # collections before the one that drew a token
    weights: Float[Array, " n"] | None = None  # what each counts in a loss; None: 1


# (tasks, completions) → rewards, one or several, NaN where a completion cannot be scored
Reward = Callable[[Tasks, Completions], tuple[Float[Array, "p g *k"], Metrics]]


@runtime_checkable
class Collect(Protocol):
    """(key, model, tasks) → (episodes, metrics)."""

    def __call__(self, key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        """Roll out every task."""
        ...


@dataclass(frozen=True)
class Grouped:
    """A collector that says how many completions of each prompt it brings."""

    collect: Collect
    group: int

    def __call__(self, key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        """Roll out every task."""
        return self.collect(key, model, tasks)


def single_turn(
    reward: Reward, sampling: Sampling, *, group: int, stop: StopStrings | None = None
) -> Collect:
    """`group` completions of every prompt, each scored by `reward`; of several rewards the sum.

    A JAX function if the reward is one.
    """
    if group < 1:
        raise ValueError(f"expected group ≥ 1, got {group}")

    def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        completions = generate(key, model, tasks.prompts, sampling, group=group, stop=stop)
        rewards, metrics = reward(tasks, completions)
        p, n = len(rewards), len(rewards) * group
        parts = rewards.reshape(n, -1)
        # Greedy log-probabilities are taken at temperature 1.
        temperature = jnp.asarray(sampling.temperature, jnp.float32)
        flat = lambda x: x.reshape(n, *x.shape[2:])  # noqa: E731
        episodes = Episodes(
            prompts=tasks.prompts,
            group=jnp.repeat(jnp.arange(p, dtype=jnp.int32), group),
            tokens=flat(completions.tokens),
            lengths=flat(completions.lengths),
            mask=flat(completions.mask),
            logps=flat(completions.logps),
            rewards=jnp.where(jnp.isnan(parts).all(1), jnp.nan, jnp.nansum(parts, 1)),
            finish=flat(completions.finish),
            temperature=jnp.broadcast_to(jnp.where(temperature > 0, temperature, 1.0), (n,)),
            components=parts if rewards.ndim == 3 else None,
        )
        return episodes, metrics

    return Grouped(collect, group)


class Places(eqx.Module):
    """Where n episodes lie in rows."""

    episodes: Int[Array, "b e"]  # the episode in each of a row's places; n or more: none
    tokens: Int[Array, "b t"]  # which of the episodes' tokens, [n·t] in one line; n·t or more: none

    def per_episode(self, x: Array) -> Array:
        """[n, ...] → [b, e, ...], 0 where there is no episode."""
        return x.at[self.episodes].get(mode="fill", fill_value=0)

    def per_row(self, x: Array) -> Array:
        """[n, ...] → [b, ...]: what all episodes of a row have in common."""
        return x[jnp.minimum(self.episodes[:, 0], x.shape[0] - 1)]

    def per_token(self, x: Array) -> Array:
        """[n, t] → [b, t], 0 on prompts and padding."""
        return x.reshape(-1).at[self.tokens].get(mode="fill", fill_value=0)


# Rows of episodes, and where they lie in them: `to_rows`, `packing.Packed`
Lay = Callable[[Episodes], tuple[Rows, Places]]


@eqx.filter_jit
def to_rows(episodes: Episodes, *, per_row: int | None = None) -> tuple[Rows, Places]:
    """Rows that hold `per_row` episodes of one group (by default all of it) behind their prompt,
    computed once.

    Groups are found by their id, wherever their episodes stand. Error: groups that `per_row` does
    not divide.
    """
    n, p = episodes.group.shape[0], episodes.prompts.tokens.shape[0]
    if n % p:
        raise ValueError(f"expected groups of one size, got {n} episodes of {p} prompts")
    group = n // p
    per_row = group if per_row is None else per_row
    if group % per_row:
        raise ValueError(f"groups of {group} do not divide into rows of {per_row} episodes")
    order = jnp.argsort(episodes.group, stable=True).astype(jnp.int32)
    members, t = order.reshape(n // per_row, per_row), episodes.tokens.shape[1]
    inside = members[:, :, None] * t + jnp.arange(t, dtype=jnp.int32)
    trunk = [(0, 0), (episodes.prompts.tokens.shape[1], 0)]
    lines = jnp.pad(inside.reshape(n // per_row, per_row * t), trunk, constant_values=n * t)
    places = Places(members, lines)
    owner = episodes.group[members[:, 0]]
    rows = group_rows(
        episodes.prompts.tokens[owner],
        episodes.prompts.lengths[owner],
        places.per_episode(episodes.tokens),
        places.per_episode(episodes.lengths),
        places.per_episode(episodes.mask),
        restarts=None if episodes.restarts is None else places.per_episode(episodes.restarts),
    )
    return rows, places


def episode_metrics(episodes: Episodes) -> Metrics:
    """Rewards, lengths and endings of a step's episodes, under the field's names.

    Lengths in tokens.
    """
    rewards, lengths = episodes.rewards, episodes.lengths.astype(jnp.float32)
    scored = jnp.isfinite(rewards)
    cut = episodes.finish == LENGTH
    return {
        "reward": masked_mean(rewards, scored),
        "reward/quantiles": quantiles(rewards, scored),
        "frac_unscored": mean_of(1.0 - scored.astype(jnp.float32)),
        "completions/mean_length": mean_of(lengths),
        "completions/min_length": scalar_mean(lengths.min()),
        "completions/max_length": scalar_mean(lengths.max()),
        "completions/length/quantiles": quantiles(lengths),
        "completions/mean_terminated_length": masked_mean(lengths, ~cut),
        "completions/clipped_ratio": mean_of(cut.astype(jnp.float32)),
        "num_tokens": scalar_mean(lengths.sum()),
    }
