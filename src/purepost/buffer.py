"""An experience buffer: whole groups of episodes, kept for steps to come. Pure functions of arrays.

Episodes keep the log-probabilities that they were sampled with, so `losses.correction` weighs them
by π_old/π_sampler, and they say how stale they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from .mean import Metrics, mean_of, scalar_mean
from .models.decoder import Decoder
from .rollout.collect import Collect, Episodes, Tasks
from .rollout.stateful import StatefulCollect, Stateless
from .types import KeyArray, Scalar

FREE = -1  # the time at which nothing was put in a slot


class Buffer(eqx.Module):
    """c slots for groups of g episodes each, in the order in which they were put in."""

    episodes: Episodes  # those of a slot side by side
    added: Int[Array, " c"]  # the time at which a group was put in; FREE: none was
    drawn: Int[Array, " c"]  # how often it was sampled
    now: Int[Array, ""]  # steps so far

    @property
    def groups(self) -> "Groups":
        """What priorities are functions of."""
        c = self.added.shape[0]
        stale = _stale(self.episodes).reshape(c, -1).max(1)
        age = self.now - self.added + stale
        return Groups(age, self.drawn, self.episodes.rewards.reshape(c, -1), self.added > FREE)


class Groups(eqx.Module):
    """What is known of c groups."""

    age: Int[Array, " c"]  # steps since the oldest policy that sampled some of it
    drawn: Int[Array, " c"]  # how often it was sampled from the buffer
    rewards: Float[Array, "c g"]  # NaN: unscored
    filled: Bool[Array, " c"]


# groups → how much each is worth, ≥ 0; 0: nothing
Priority = Callable[[Groups], Float[Array, " c"]]


def evenly(groups: Groups) -> Float[Array, " c"]:
    """1 each."""
    return jnp.ones(groups.age.shape)


def by_age(decay: Scalar) -> Priority:
    """decay^age: the fresher the better."""
    return lambda groups: jnp.asarray(decay, jnp.float32) ** groups.age.astype(jnp.float32)


def by_variance(floor: Scalar = 0.0) -> Priority:
    """The variance of the group's rewards, the scored ones, and `floor`: what is neither always
    solved nor never.
    """

    def priority(groups: Groups) -> Float[Array, " c"]:
        scored = jnp.isfinite(groups.rewards)
        count = jnp.maximum(scored.sum(1), 1).astype(jnp.float32)
        rewards = jnp.where(scored, groups.rewards, 0.0)
        centred = jnp.where(scored, rewards - (rewards.sum(1) / count)[:, None], 0.0)
        return (centred**2).sum(1) / count + floor

    return priority


def newest(groups: Groups) -> Float[Array, " c"]:
    """First in, first out: the younger the better."""
    return 1.0 / (1.0 + groups.age.astype(jnp.float32))


def within(max_staleness: int, priority: Priority = newest) -> Priority:
    """The priority, and 0 of groups that are older than that, in steps."""
    if max_staleness < 0:
        raise ValueError(f"expected max_staleness ≥ 0 steps, got {max_staleness}")
    return lambda groups: jnp.where(groups.age <= max_staleness, priority(groups), 0.0)


def empty(like: Episodes, capacity: int) -> Buffer:
    """A buffer of that many groups of such episodes, with nothing in it. Error: no capacity."""
    if capacity < 1:
        raise ValueError(f"expected capacity ≥ 1 group, got {capacity}")
    size = _size(like)
    like = _described(like)

    def zeros(x: Array, n: int) -> Array:
        return jnp.zeros((n, *x.shape[1:]), x.dtype)

    episodes = jax.tree.map(lambda x: zeros(x, capacity * size), like)
    prompts = jax.tree.map(lambda x: zeros(x, capacity), like.prompts)
    free = jnp.full(capacity, FREE, jnp.int32)
    return Buffer(
        _numbered(dataclasses.replace(episodes, prompts=prompts), capacity),
        free,
        jnp.zeros(capacity, jnp.int32),
        jnp.zeros((), jnp.int32),
    )


@eqx.filter_jit
def add(buffer: Buffer, episodes: Episodes, *, worth: Priority = newest) -> Buffer:
    """Put groups in. Where there is no room the least worth go, of equal ones the oldest; those
    worth nothing, and those of which nothing was sampled and scored, go in any case.
    """
    p, c = episodes.prompts.lengths.shape[0], buffer.added.shape[0]
    size = _size(episodes)
    if size != _size(buffer.episodes):
        raise ValueError(f"expected groups of {_size(buffer.episodes)} episodes, got {size}")
    joined = join(buffer.episodes, episodes)
    of_use = (jnp.isfinite(episodes.rewards) & episodes.mask.any(1)).reshape(p, size).any(1)
    added = jnp.concatenate([buffer.added, jnp.where(of_use, buffer.now, FREE)])
    drawn = jnp.concatenate([buffer.drawn, jnp.zeros(p, jnp.int32)])
    both = Buffer(joined, added, drawn, buffer.now)
    groups = both.groups
    value = jnp.where(groups.filled, worth(groups), 0.0)
    order = jnp.lexsort((jnp.arange(c + p), value))[p:]  # the last win ties
    order = jnp.sort(order).astype(jnp.int32)
    kept = jnp.where(value[order] > 0, added[order], FREE)
    return Buffer(take(joined, order), kept, drawn[order], buffer.now)


@eqx.filter_jit
def sample(
    key: KeyArray,
    buffer: Buffer,
    n: int,
    *,
    priority: Priority = evenly,
    exponent: Scalar = 1.0,
    correction: Scalar = 0.0,
) -> tuple[Episodes, Buffer]:
    """n groups, each with P(i) ∝ priority^exponent, one and the same perhaps more than once.

    Episodes say how stale they are by now, and count (N·P(i))^−correction in a loss, whose means
    only ratios of these matter to. Where nothing is worth anything they are unscored.

    Source: Schaul et al., Prioritized experience replay, 1511.05952, §3.3, §3.4.
    """
    groups = buffer.groups
    value = jnp.where(groups.filled, priority(groups), 0.0)
    logits = jnp.where(value > 0, exponent * jnp.log(jnp.where(value > 0, value, 1.0)), -jnp.inf)
    some = (value > 0).any()
    logits = jnp.where(some, logits, 0.0)
    chosen = jr.categorical(key, logits, shape=(n,)).astype(jnp.int32)
    log_p = jax.nn.log_softmax(logits)[chosen] + jnp.log((value > 0).sum().astype(jnp.float32))
    weights = jnp.where(some, jnp.exp(-correction * log_p), 0.0)
    size = _size(buffer.episodes)
    episodes, each = take(buffer.episodes, chosen), lambda x: jnp.repeat(x, size)
    age = each((buffer.now - buffer.added)[chosen])
    episodes = dataclasses.replace(
        episodes,
        staleness=_stale(episodes) + age,
        weights=_weights(episodes) * each(weights),
        rewards=jnp.where(some, episodes.rewards, jnp.nan),
    )
    counted = buffer.drawn.at[chosen].add(some.astype(jnp.int32))
    return episodes, dataclasses.replace(buffer, drawn=counted)


def take(episodes: Episodes, groups: Int[Array, " n"]) -> Episodes:
    """Some groups of episodes that stand group after group."""
    size = _size(episodes)
    rows = (groups[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
    taken = jax.tree.map(lambda x: x[rows], episodes)
    prompts = jax.tree.map(lambda x: x[groups], episodes.prompts)
    return _numbered(dataclasses.replace(taken, prompts=prompts), groups.shape[0])


def join(*several: Episodes) -> Episodes:
    """Episodes of several collectors, of groups of one size, as one: of the widest's width.

    Error: fields that only some have.
    """
    several = tuple(_described(episodes) for episodes in several)
    first, *others = (jax.tree.structure(episodes) for episodes in several)
    if any(other != first for other in others):
        names = [{k for k, v in vars(e).items() if v is not None} for e in several]
        odd = sorted(set().union(*names) - set.intersection(*names))
        raise ValueError(f"expected episodes with the same fields, got {odd} in some only")

    def lay(*arrays: Array) -> Array:
        if arrays[0].ndim > 1:
            width = max(x.shape[1] for x in arrays)
            return jnp.concatenate([jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in arrays])
        return jnp.concatenate(arrays)

    joined = jax.tree.map(lay, *several)
    return _numbered(joined, joined.prompts.lengths.shape[0])


@final
class Replayed:
    """A collector (a `StatefulCollect`) that brings `groups` groups of a buffer beside those that
    are new, which it then puts in.

    `priority`, `exponent` and `correction` are those of `sample`, `worth` is that of `add`. Without
    `fresh` all that comes back is the buffer's, what is new included. `collect` may be one that
    carries something itself. Any algorithm takes it; let it correct for what the sampler was.
    """

    def __init__(
        self,
        collect: Collect | StatefulCollect[Any],
        *,
        capacity: int,
        groups: int,
        priority: Priority = evenly,
        exponent: Scalar = 1.0,
        correction: Scalar = 0.0,
        worth: Priority = newest,
        fresh: bool = True,
    ) -> None:
        for name, n in dict(capacity=capacity, groups=groups).items():
            if n < 1:
                raise ValueError(f"expected {name} ≥ 1, got {n}")
        self.collect = collect if isinstance(collect, StatefulCollect) else Stateless(collect)
        self.capacity, self.groups, self.fresh, self.worth = capacity, groups, fresh, worth
        self.sampling: dict[str, Any] = dict(
            priority=priority, exponent=exponent, correction=correction
        )

    def start(self) -> tuple[Any, Buffer | None]:
        """What the collector carries; no buffer before the first episodes."""
        return self.collect.start(), None

    def __call__(
        self, key: KeyArray, model: Decoder, tasks: Tasks, carried: tuple[Any, Buffer | None]
    ) -> tuple[Episodes, Metrics, tuple[Any, Buffer | None]]:
        """Collect, and sample of what there is."""
        k_collect, k_sample = jr.split(key)
        inner, buffer = carried
        episodes, metrics, inner = self.collect(k_collect, model, tasks, inner)
        buffer = empty(episodes, self.capacity) if buffer is None else buffer
        if not self.fresh:
            buffer = add(buffer, episodes, worth=self.worth)
        found, buffer = sample(k_sample, buffer, self.groups, **self.sampling)
        if self.fresh:
            buffer = add(buffer, episodes, worth=self.worth)
            found = join(episodes, found)
        filled = mean_of(buffer.groups.filled.astype(jnp.float32))
        staleness = scalar_mean(_stale(found).max())
        metrics = metrics | {"buffer/filled": filled, "buffer/max_staleness": staleness}
        later = dataclasses.replace(buffer, now=buffer.now + 1)
        return found, metrics, (inner, later)


def _size(episodes: Episodes) -> int:
    return episodes.group.shape[0] // episodes.prompts.lengths.shape[0]


def _stale(episodes: Episodes) -> Int[Array, " n"]:
    return jnp.zeros_like(episodes.group) if episodes.staleness is None else episodes.staleness


def _weights(episodes: Episodes) -> Float[Array, " n"]:
    return jnp.ones(episodes.group.shape) if episodes.weights is None else episodes.weights


def _described(episodes: Episodes) -> Episodes:
    """The episodes group after group, with all that has a value where it is not given."""
    order = jnp.argsort(episodes.group, stable=True)
    ordered = jax.tree.map(lambda x: x[order], episodes)
    restarts = ordered.restarts
    return dataclasses.replace(
        ordered,
        prompts=episodes.prompts,
        staleness=_stale(ordered),
        weights=_weights(ordered),
        restarts=jnp.zeros_like(ordered.mask) if restarts is None else restarts,
    )


def _numbered(episodes: Episodes, groups: int) -> Episodes:
    """The episodes, whose groups stand one after another."""
    size = episodes.group.shape[0] // groups
    order = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), size)
    return dataclasses.replace(episodes, group=order)
