"""Rows with labels, as preference, reward-model and unpaired algorithms take them for data."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..types import Rows, group_rows
from .collect import Episodes


class Pairs(eqx.Module):
    """Preferences: in each row a prompt, continued by the chosen completion (episode 0) and the
    rejected one (episode 1).
    """

    rows: Rows
    margins: Float[Array, " b"]  # by how much the chosen one is better; 0 where it is not known
    real: Bool[Array, " b"]  # False: the row only fills the batch up


class Judged(eqx.Module):
    """A prompt and a completion in each row, and whether the completion is good."""

    rows: Rows
    good: Bool[Array, " b"]
    real: Bool[Array, " b"]  # False: the row only fills the batch up


class Steps(eqx.Module):
    """Solutions in steps: `rows.mask` is True at the last token of each step."""

    rows: Rows
    right: Bool[Array, "b t"]  # whether the step that ends here is right


def beside_the_next(rows: Rows, real: Bool[Array, " b"]) -> tuple[Rows, Bool[Array, " b"]]:
    """Each row's prompt with two completions: its own (episode 0), and that of the next row by id
    among the real ones, the first after the last (episode 1). And where these are two rows.

    The rows hold one plain sequence each, whose first trained token begins the completion.
    """
    b, t = rows.tokens.shape
    order = jnp.lexsort((rows.ids, (~real).astype(jnp.int32)))
    rank = jnp.zeros(b, jnp.int32).at[order].set(jnp.arange(b, dtype=jnp.int32))
    following = jnp.where(rank + 1 < real.sum(), rank + 1, 0)
    partner = order[following].astype(jnp.int32)
    begin = jnp.argmax(rows.mask, 1).astype(jnp.int32)[:, None]
    last = t - jnp.argmax(rows.mask[:, ::-1], 1).astype(jnp.int32)[:, None]
    step = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    source = step + begin[partner]
    there = source < jnp.where(rows.mask.any(1, keepdims=True), last, 0)[partner]
    source = jnp.minimum(source, t - 1)
    index, before = t + step, jnp.maximum(begin - 1, 0)

    def taken(x: Array) -> Array:
        return jnp.take_along_axis(x[partner], source, 1)

    branch = {
        "tokens": jnp.where(there, taken(rows.tokens), 0),
        "end": jnp.where(there, t + there.sum(1, keepdims=True, dtype=jnp.int32), index + 1),
        "positions": jnp.where(there, begin + step, 0),
        "parent": jnp.where(there, jnp.where(step == 0, before, index - 1), index),
        "mask": taken(rows.mask) & there,
        "episode": jnp.ones((b, t), jnp.int32),
    }
    own = {
        "tokens": rows.tokens,
        "end": jnp.where(step < begin, 2 * t, rows.end),
        "positions": rows.positions,
        "parent": rows.parent,
        "mask": rows.mask,
        "episode": jnp.zeros((b, t), jnp.int32),
    }
    both = {name: jnp.concatenate([own[name], branch[name]], 1) for name in own}
    wide = Rows(**both, ids=rows.ids, capacity=2 * rows.most_trained, episodes=2)
    return wide, real & (partner != jnp.arange(b, dtype=jnp.int32))


@eqx.filter_jit
def best_and_worst(episodes: Episodes) -> tuple[Pairs, Int[Array, "p 2"]]:
    """A row for each prompt: its best rewarded episode as the chosen one, its worst as the rejected
    one; and which episodes these are. A group whose scored rewards are all equal does not count.

    Error: groups of one.
    """
    n, p = episodes.group.shape[0], episodes.prompts.tokens.shape[0]
    if n % p or n < 2 * p:
        raise ValueError(f"expected at least 2 completions of each prompt, got {n} of {p} prompts")
    members = jnp.argsort(episodes.group, stable=True).astype(jnp.int32).reshape(p, n // p)
    rewards = episodes.rewards[members]
    scored = jnp.isfinite(rewards)
    high, low = jnp.where(scored, rewards, -jnp.inf), jnp.where(scored, rewards, jnp.inf)
    ends = jnp.stack([high.argmax(1), low.argmin(1)], 1)
    picked = jnp.take_along_axis(members, ends, 1)
    rows = group_rows(
        episodes.prompts.tokens,
        episodes.prompts.lengths,
        episodes.tokens[picked],
        episodes.lengths[picked],
        episodes.mask[picked],
        ids=episodes.prompts.ids,
        restarts=None if episodes.restarts is None else episodes.restarts[picked],
    )
    return Pairs(rows, jnp.zeros(p), high.max(1) > low.min(1)), picked
