"""Dynamic sampling: draw prompts until enough groups of completions have rewards that differ.

Source: Yu et al., DAPO, 2503.14476, §3.2.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from ..mean import Mean, Metrics, add, mean_of, scalar_mean
from ..models.decoder import Decoder
from ..types import KeyArray
from .collect import Collect, Episodes, Grouped, Tasks, episode_metrics


class _Drawn(eqx.Module):
    """What the draws so far have brought."""

    draws: Int[Array, ""]
    kept: Int[Array, ""]  # groups
    episodes: Episodes
    metrics: Metrics


def dynamic(collect: Collect, draws: int) -> Collect:
    """A collector of p groups whose rewards differ, out of `draws`·p tasks.

    p tasks are drawn at a time, at most `draws` times, until p groups are mixed; the first p of
    them in draw order are kept. Where there are fewer, the rest are empty episodes without a
    reward, of weight 0. The metrics are of all that was drawn. Error: tasks that `draws` does not
    divide.
    """
    if draws < 1:
        raise ValueError(f"expected draws ≥ 1, got {draws}")

    def drawn_collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        p, rest = divmod(tasks.prompts.lengths.shape[0], draws)
        if rest or not p:
            raise ValueError(
                f"expected a pool of prompts that {draws} draws divide, got {p * draws + rest}; "
                "let each step's data hold draws × prompts of them"
            )

        def draw(i: Int[Array, ""] | int) -> tuple[Episodes, Metrics]:
            part = _part(tasks, i, p)
            episodes, metrics = collect(jr.fold_in(key, i), model, part)
            episodes = _by_group(episodes)
            one_reward = 1.0 - _mixed(episodes).astype(jnp.float32)
            more = {"frac_reward_zero_std": mean_of(one_reward)}
            return episodes, metrics | episode_metrics(episodes) | more

        def more(drawn: _Drawn) -> _Drawn:
            episodes, metrics = draw(drawn.draws)
            kept, merged = _merge(drawn.kept, drawn.episodes, episodes)
            return _Drawn(drawn.draws + 1, kept, merged, add(drawn.metrics, metrics))

        def unfinished(drawn: _Drawn) -> Bool[Array, ""]:
            return (drawn.draws < draws) & (drawn.kept < p)

        first, metrics = draw(0)
        kept, merged = _merge(jnp.zeros((), jnp.int32), _empty(first), first)
        drawn = _Drawn(jnp.ones((), jnp.int32), kept, merged, metrics)
        if draws > 1 and isinstance(kept, Tracer):
            drawn = jax.lax.while_loop(unfinished, more, drawn)
        while not isinstance(kept, Tracer) and unfinished(drawn):
            drawn = more(drawn)
        return drawn.episodes, drawn.metrics | {
            "dynamic/draws": scalar_mean(drawn.draws),
            "dynamic/frac_filler": Mean((p - drawn.kept).astype(jnp.float32), jnp.float32(p)),
        }

    grouped = isinstance(collect, Grouped)
    return Grouped(drawn_collect, collect.group) if grouped else drawn_collect


def _part(tasks: Tasks, i: Int[Array, ""] | int, p: int) -> Tasks:
    """The p tasks of draw i: of arrays a slice, of lists of columns too."""

    def cut(x: Any) -> Any:
        if eqx.is_array(x):
            return jax.lax.dynamic_slice_in_dim(x, i * p, p)
        return x[int(i) * p : (int(i) + 1) * p]

    columns = {name: cut(column) for name, column in tasks.columns.items()}
    return Tasks(jax.tree.map(cut, tasks.prompts), columns)


def _by_group(episodes: Episodes) -> Episodes:
    """The episodes in the order of their groups, those of one group together."""
    order = jnp.argsort(episodes.group, stable=True)
    moved = jax.tree.map(lambda x: x[order], episodes)
    return eqx.tree_at(lambda e: e.prompts, moved, episodes.prompts)


def _mixed(episodes: Episodes) -> Bool[Array, " p"]:
    """Which groups have rewards that differ."""
    rewards = episodes.rewards.reshape(episodes.prompts.lengths.shape[0], -1)
    scored = jnp.isfinite(rewards)
    highest = jnp.where(scored, rewards, -jnp.inf).max(1)
    return highest > jnp.where(scored, rewards, jnp.inf).min(1)


def _empty(episodes: Episodes) -> Episodes:
    """As many groups of empty, unscored episodes."""
    zeros = jax.tree.map(jnp.zeros_like, episodes)
    where = lambda e: (e.group, e.rewards, e.temperature)  # noqa: E731
    kept = (episodes.group, jnp.full_like(episodes.rewards, jnp.nan), episodes.temperature)
    return eqx.tree_at(where, zeros, kept)


def _merge(kept: Int[Array, ""], old: Episodes, new: Episodes) -> tuple[Int[Array, ""], Episodes]:
    """The new mixed groups behind the first `kept` of the old ones, as far as there is room."""
    p = new.prompts.lengths.shape[0]
    mixed = _mixed(new)
    slots = jnp.where(mixed, kept + jnp.cumsum(mixed, dtype=jnp.int32) - 1, p)
    groups = jnp.arange(p, dtype=jnp.int32)
    source = groups.at[slots].set(p + groups, mode="drop")  # of [old | new]
    size = new.group.shape[0] // p
    rows = (size * source[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)

    def choose(index: Int[Array, " m"], *of: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b])[index], *of)

    merged = choose(rows, old, new)
    merged = eqx.tree_at(lambda e: e.prompts, merged, choose(source, old.prompts, new.prompts))
    merged = eqx.tree_at(lambda e: e.group, merged, new.group)
    return jnp.minimum(kept + mixed.sum(dtype=jnp.int32), p), merged
