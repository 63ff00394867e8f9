"""The engine's pure half: programs over a fixed set of slots, each with a row of its own to decode,
by its own settings.

Between rounds, what is small is on the host: the arrays of `Settings` and `Progress` are then
NumPy's, and written to.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from ..models.block import Block
from ..models.cache import unstack
from ..models.decoder import Decoder
from ..models.slots import Slots, extend, read_slot, resize, write_slot
from ..weights import for_sampling
from .draw import Sampling, draw
from .requests import Request
from .sample import LENGTH, STOP
from .speculative import guess, right_so_far
from .stop import StopStrings


class Weights(eqx.Module):
    """A model laid out for decoding."""

    model: Decoder  # but for its layers
    blocks: list[Block]


class Filters(eqx.Module):
    """What each row leaves out, as in `Sampling`."""

    top_k: Int[Array, " s"]
    top_p: Float[Array, " s"]
    min_p: Float[Array, " s"]


class Settings(eqx.Module):
    """How each row is drawn, and where it ends."""

    keys: UInt32[Array, "s w"]  # data of the keys
    temperature: Float[Array, " s"]
    filters: Filters | None  # None: no row leaves anything out
    limits: Int[Array, " s"]  # the number that no token has any more
    stop_ids: Int[Array, "s i"]  # filled up with −1
    strings: Bool[Array, "s n"]  # which of the stop strings count

    def assign(self, slot: int, request: Request) -> None:
        """Say how a slot's row is drawn (on the host, in place)."""
        sampling, strings = request.sampling, request.strings
        assert self.filters is not None
        ids = np.full(self.stop_ids.shape[1], -1)
        ids[: len(sampling.stop_ids)] = sampling.stop_ids
        counts = np.full(self.strings.shape[1], strings is None)
        counts[list(strings or ())] = True
        for array, value in (
            (self.keys, request.key),
            (self.temperature, sampling.temperature),
            (self.filters.top_k, sampling.top_k),
            (self.filters.top_p, sampling.top_p),
            (self.filters.min_p, sampling.min_p),
            (self.limits, request.first + sampling.max_tokens),
            (self.stop_ids, ids),
            (self.strings, counts),
        ):
            _write(array, slot, value)

    def leaves_out(self, slots: Int[np.ndarray, " n"]) -> bool:
        """Whether a row of these slots leaves anything out (on the host)."""
        f = self.filters
        assert f is not None
        return bool(((f.top_k > 0) | (f.top_p < 1) | (f.min_p > 0))[slots].any())


class Progress(eqx.Module):
    """How far each row has come."""

    live: Bool[Array, " s"]
    token: Int[Array, " s"]  # the last one: its keys and values are not in the slot yet
    length: Int[Array, " s"]  # tokens whose keys and values are
    drawn: Int[Array, " s"]  # the number of the next token of the completion
    finish: Int[Array, " s"]
    matched: Int[Array, "s n"]  # bytes of each stop string
    history: Int[Array, "s t"] | None  # prompt and completion; None: nobody guesses

    def assign(self, slot: int, request: Request) -> None:
        """Nothing has been drawn of the slot's row yet (on the host, in place, as below)."""
        for array, value in ((self.drawn, request.first), (self.finish, LENGTH), (self.matched, 0)):
            _write(array, slot, value)

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        """All of these but the last are in the slot: decode it."""
        _write(self.live, slot, True)
        _write(self.token, slot, tokens[-1])
        _write(self.length, slot, len(tokens) - 1)
        if self.history is not None:
            whole = np.zeros(self.history.shape[1])
            whole[: len(tokens)] = tokens
            _write(self.history, slot, whole)

    def halt(self, slot: int) -> None:
        """Do not decode the slot."""
        _write(self.live, slot, False)


def _write(x: Any, slot: int, value: Any) -> None:
    x[slot] = value


class Drawn(eqx.Module):
    """The tokens of a round, and their log-probabilities as in `Completions`."""

    tokens: Int[Array, "s r"]
    logps: Float[Array, "s r"]
    counts: Int[Array, " s"]


class Work(eqx.Module):
    """Steps of a round, and rows that lived through each, added up."""

    steps: Int[Array, ""]
    busy: Int[Array, ""]


class Round(eqx.Module):
    """What a round reads and leaves as it is."""

    weights: Weights
    settings: Settings
    stop: StopStrings | None
    eager: Bool[Array, ""]  # ends with the step in which a row ends: others wait for its slot
    steps: int = eqx.field(static=True)  # at most
    guesses: int = eqx.field(static=True, default=0)  # tokens guessed in each step
    ngram: int = eqx.field(static=True, default=3)  # by so many tokens before them


_unstack = eqx.filter_jit(unstack)


def lay_out(model: Decoder) -> Weights:
    """The model's weights for decoding. Arrays that need no change are the model's own."""
    merged = for_sampling(model)
    return Weights(eqx.tree_at(lambda m: m.layers, merged, None), _unstack(merged))


@eqx.filter_jit(donate="all-except-first")
def decode_round(
    fixed: Round, slots: Slots, progress: Progress
) -> tuple[Slots, Progress, Drawn, Work]:
    """Decode every live row until it ends or the round does. Slots are updated in place."""
    s, room = progress.live.shape[0], fixed.steps * (fixed.guesses + 1)
    none = jnp.zeros((), jnp.int32)
    drawn = Drawn(jnp.zeros((s, room), jnp.int32), jnp.zeros((s, room)), jnp.zeros(s, jnp.int32))
    began = progress.live

    def going(carry: Any) -> Bool[Array, ""]:
        _, now, _, work = carry
        some_ended = (began & ~now.live).any()
        return (work.steps < fixed.steps) & now.live.any() & ~(fixed.eager & some_ended)

    def step(carry: Any) -> Any:
        slots, now, drawn, work = carry
        work = Work(work.steps + 1, work.busy + now.live.sum(dtype=jnp.int32))
        return *_step(fixed, slots, now, drawn), work

    return jax.lax.while_loop(going, step, (slots, progress, drawn, Work(none, none)))


def _step(fixed: Round, slots: Slots, now: Progress, drawn: Drawn) -> tuple[Slots, Progress, Drawn]:
    """Feed each row's last token, and guesses of what follows it; draw what does."""
    model, settings = fixed.weights.model, fixed.settings
    fed = now.token[:, None]
    if fixed.guesses and now.history is not None:
        more = guess(now.history, now.length, ngram=fixed.ngram, count=fixed.guesses)
        fed = jnp.concatenate([fed, more], 1)
    s, c = fed.shape
    start = jnp.where(now.live, now.length, slots.room)
    hidden, slots = extend(model, fixed.weights.blocks, slots, fed, start)
    at = now.drawn[:, None] + jnp.arange(c, dtype=jnp.int32)
    keys = jr.wrap_key_data(jnp.asarray(settings.keys))
    keys = jax.vmap(jax.vmap(jr.fold_in, (None, 0)))(keys, at)
    each = jax.tree.map(
        lambda x: jnp.repeat(jnp.asarray(x), c, 0), (settings.temperature, settings.filters)
    )
    logits = model.unembed(hidden.reshape(s * c, -1))
    token, logp = draw_each(keys.reshape(-1), logits, *each)
    tokens, logps = token.reshape(s, c), logp.reshape(s, c)
    return slots, *_take(fixed, now, drawn, fed, tokens, logps)


def _take(
    fixed: Round,
    now: Progress,
    drawn: Drawn,
    fed: Int[Array, "s c"],
    tokens: Int[Array, "s c"],
    logps: Float[Array, "s c"],
) -> tuple[Progress, Drawn]:
    """Add to each live row the draws up to the first that ends it or that follows a wrong guess."""
    settings, stop = fixed.settings, fixed.stop
    c, row = tokens.shape[1], jnp.arange(tokens.shape[0])[:, None]
    place = jnp.arange(c, dtype=jnp.int32)
    hit = (tokens[..., None] == settings.stop_ids[:, None]).any(-1)
    matched = [now.matched]
    if stop is not None:
        for i in range(c):
            matched.append(stop.advance(matched[-1], tokens[:, i])[0])
        complete = jnp.stack(matched[1:], 1) == stop.lengths
        hit |= (complete & settings.strings[:, None]).any(-1)
    over = hit | (now.drawn[:, None] + place + 1 >= settings.limits[:, None])
    ended_before = jnp.cumsum(over, 1) > over.astype(jnp.int32)
    counts = now.live[:, None] & right_so_far(fed[:, 1:], tokens) & ~ended_before
    count = counts.sum(1, dtype=jnp.int32)

    def put(x: Array, new: Array, first: Int[Array, " s"]) -> Array:
        at = jnp.where(counts, first[:, None] + place, x.shape[1])  # beyond: nowhere
        return x.at[row, at].set(new)

    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    progress = dataclasses.replace(
        now,
        live=now.live & ~(counts & over).any(1),
        token=jnp.where(now.live, last, now.token),
        length=now.length + count,
        drawn=now.drawn + count,
        finish=jnp.where((counts & hit).any(1), STOP, now.finish),
        matched=jnp.stack(matched, 1)[row[:, 0], count] if stop is not None else now.matched,
        history=None if now.history is None else put(now.history, tokens, now.length + 1),
    )
    return progress, Drawn(
        put(drawn.tokens, tokens, drawn.counts),
        put(drawn.logps, logps, drawn.counts),
        drawn.counts + count,
    )


def draw_each(
    keys: Key[Array, " n"],
    logits: Float[Array, "n v"],
    temperature: Float[Array, " n"],
    filters: Filters | None,
) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """As `draw`, but every row has a temperature and filters of its own."""

    def one(
        key: Key[Array, ""],
        row: Float[Array, " v"],
        temperature: Float[Array, ""],
        filters: Filters | None,
    ) -> tuple[Int[Array, ""], Float[Array, ""]]:
        sampling = Sampling(1, temperature)
        if filters is None:
            token, logp = draw(key[None], row[None], sampling)
            return token[0], logp[0]
        # A mass that is never reached leaves nothing out.
        mass = jnp.where(filters.top_p < 1, filters.top_p, 2.0)
        sampling = dataclasses.replace(sampling, top_p=mass, min_p=filters.min_p)
        kept = jnp.where(_among_top(row, filters.top_k), row, -jnp.inf)
        token = draw(key[None], kept[None], sampling)[0][0]
        scaled = row / jnp.where(temperature > 0, temperature, 1.0)
        return token, scaled[token] - jax.nn.logsumexp(scaled)

    return jax.vmap(one)(keys, logits, temperature, filters)


def _among_top(x: Float[Array, " v"], k: Int[Array, ""]) -> Bool[Array, " v"]:
    """Which entries are among the k highest, ties together; all for k = 0. By bisection over the
    floats' bits, put in order.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # as high as low are k entries, as high as high are fewer
        middle = (low & high) + ((low ^ high) >> 1)
        enough = (ordered >= middle).sum() >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = jax.lax.fori_loop(0, 33, halve, (ordered.min(), ordered.max() + 1))
    return (ordered >= low) | (k <= 0)


@eqx.filter_jit(donate="all-except-first")
def prefill_chunk(
    fixed: tuple[Weights, Int[Array, ""], Int[Array, "1 c"], Int[Array, " 1"]], slots: Slots
) -> Slots:
    """The slots with a piece of one row's tokens in them: (weights, slot, tokens, the first one's
    number). In place.
    """
    weights, slot, tokens, start = fixed
    part = read_slot(slots, slot, slots.room)
    _, part = extend(weights.model, weights.blocks, part, tokens, start)
    return write_slot(slots, slot, part)


@eqx.filter_jit(donate="all-except-first")
def restore(fixed: tuple[Int[Array, ""], Slots], slots: Slots) -> Slots:
    """The slots with one of them beginning as the part does, in place."""
    slot, part = fixed
    return write_slot(slots, slot, part)


copy_slot = eqx.filter_jit(read_slot)
refit = eqx.filter_jit(resize)


def vacant(
    slots: int, *, stop_ids: int, strings: int, history: int | None
) -> tuple[Settings, Progress]:
    """Slots without rows, on the host: room for so many stop ids and strings, and for a history of
    so many tokens (None: nobody guesses).
    """
    ints = lambda *more: jnp.zeros((slots, *more), jnp.int32)  # noqa: E731
    settings = Settings(
        keys=jr.key_data(jr.split(jr.key(0), slots)),
        temperature=jnp.ones(slots),
        filters=Filters(ints(), jnp.ones(slots), jnp.ones(slots)),
        limits=ints(),
        stop_ids=ints(stop_ids),
        strings=jnp.zeros((slots, strings), bool),
    )
    progress = Progress(
        live=jnp.zeros(slots, bool),
        token=ints(),
        length=ints(),
        drawn=ints(),
        finish=ints(),
        matched=ints(strings),
        history=None if history is None else ints(history),
    )
    return jax.tree.map(np.array, (settings, progress))
