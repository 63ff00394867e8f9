"""Continuous batching: a fixed number of slots, each of which takes the next request as soon as its
row has ended.

`generate` decodes until the longest row of a batch has ended; here nobody waits for it. The host
decides between rounds of some steps who goes where; what a round does is a pure program
(rounds.py). There are no threads: whoever drives an engine calls `step`.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..models.decoder import Decoder
from ..models.slots import empty_slots
from ..types import KeyArray
from .draw import Sampling
from .prefixes import Prefixes
from .requests import CANCELLED, Request, Result, Row, as_completions, requests_for
from .rounds import (
    Drawn,
    Round,
    copy_slot,
    decode_round,
    lay_out,
    prefill_chunk,
    refit,
    restore,
    vacant,
)
from .sample import Completions, Prompts
from .stop import StopStrings

SMALLEST = 64  # room of a slot, tokens; it doubles as rows get longer


@dataclass(frozen=True)
class Limits:
    """What an engine may use. Lengths in tokens."""

    slots: int = 8
    room: int = 1024  # of a slot: the longest prompt and completion
    steps: int = 8  # of a round: the longest time between two visits of the host
    chunk: int = 64  # of a prompt, at most, computed in one piece
    chunks: int = 4  # between two rounds, so that rows that decode do not stand still for long
    stop_ids: int = 8  # of one request
    prefix_bytes: int = 2**28  # of what is remembered
    guesses: int = 0  # tokens guessed in each step (speculative.py); pays where few rows decode
    ngram: int = 3  # tokens that guesses go by
    cache_dtype: DTypeLike | None = None  # None: the model's; int8: a quarter of float32's memory

    def __post_init__(self) -> None:
        for name in ("slots", "room", "steps", "chunk", "chunks", "ngram"):
            if vars(self)[name] < 1:
                raise ValueError(f"expected {name} ≥ 1, got {vars(self)[name]}")
        for name in ("stop_ids", "prefix_bytes", "guesses"):
            if vars(self)[name] < 0:
                raise ValueError(f"expected {name} ≥ 0, got {vars(self)[name]}")


@dataclass
class Stats:
    """What an engine has done."""

    steps: int = 0  # of decoding
    busy: int = 0  # rows that lived through each, added up
    drawn: int = 0  # tokens
    prefilled: int = 0  # tokens of prompts that were computed
    reused: int = 0  # tokens of prompts that had been
    programs: set[tuple[str, int, int]] = field(default_factory=set)  # what, room, and which

    def occupancy(self, slots: int) -> float:
        """The share of slots that had a row to decode."""
        return self.busy / max(1, self.steps * slots)


class Engine:
    """Draws completions for requests that come and go.

    A request's tokens and log-probabilities are those of `generate` for the same key (but for
    rounding), whatever else is in the engine. A prompt that begins like another, or like a prompt
    and completion that are remembered, is computed from where they differ; every slot holds a copy
    of its own. Rows need neither be sorted nor compacted: those that have ended make way.

    The weights' arrays are the model's: they must last until the next `update`.
    """

    def __init__(self, model: Decoder, limits: Limits, *, stop: StopStrings | None = None) -> None:
        most = model.config.max_positions
        if limits.room > most:
            raise ValueError(
                f"expected a room of at most {most} tokens, the model's positions, got "
                f"{limits.room}"
            )
        self.limits, self.version, self.stats = limits, 0, Stats()
        self._stop, self._source, self._weights = stop, model, lay_out(model)
        self._prefixes = Prefixes(limits.prefix_bytes)
        self._waiting: dict[Hashable, Request] = {}  # in the order in which they came
        self._rows: list[Row | None] = [None] * limits.slots
        self._filling: deque[int] = deque()  # slots whose rows are not all there yet
        self._settings, self._now = vacant(
            limits.slots,
            stop_ids=limits.stop_ids,
            strings=0 if stop is None else len(stop.lengths),
            history=limits.room if limits.guesses else None,
        )
        self._empty()

    @property
    def active(self) -> int:
        """Slots that are taken."""
        return sum(row is not None for row in self._rows)

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + self.active

    def submit(self, request: Request) -> None:
        """Queue a request.

        Errors: an id that is in use, an empty prompt, more tokens than a slot has room for, more
        stop ids than the limit, stop strings that the engine does not have.
        """
        sampling, strings = request.sampling, self._settings.strings.shape[1]
        size, room, ids = len(request.prompt), self.limits.room, self.limits.stop_ids
        problem = None
        if request.id in self._waiting or self._slot_of(request.id) is not None:
            problem = "an id that is not in use, got it twice"
        elif not size:
            problem = "a prompt of at least 1 token, got none"
        elif size + sampling.max_tokens > room:
            problem = (
                f"prompt + max_tokens ≤ {room}, the engine's room, got {size} + "
                f"{sampling.max_tokens}; shorten one of them"
            )
        elif len(sampling.stop_ids) > ids:
            problem = f"at most {ids} stop ids, got {len(sampling.stop_ids)}; raise the limit"
        elif any(not 0 <= i < strings for i in request.strings or ()):
            problem = f"numbers of the engine's {strings} stop strings, got {request.strings}"
        if problem is not None:
            raise ValueError(f"expected {problem}, in request {request.id!r}")
        self._waiting[request.id] = request

    def step(self) -> list[Result]:
        """Admit what there is room for, compute some of its prompts, decode a round: the results of
        the rows that ended.
        """
        self._fill()
        return self._decode() if self._now.live.any() else []

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """The results of these requests, in their order. Error: there are others."""
        if self.pending:
            raise ValueError(f"expected an idle engine, got one with {self.pending} requests")
        for request in requests:
            self.submit(request)
        done: dict[Hashable, Result] = {}
        while self.pending:
            done |= {result.id: result for result in self.step()}
        return [done[request.id] for request in requests]

    def cancel(self, id: Hashable) -> Result:
        """End a request now: what it has come to. Error: no such request."""
        waiting, slot = self._waiting.pop(id, None), self._slot_of(id)
        if waiting is not None:
            return Row(waiting, list(waiting.prompt)).result(CANCELLED)
        if slot is None:
            raise ValueError(f"expected the id of a request that has not ended, got {id!r}")
        if slot in self._filling:
            self._filling.remove(slot)
        return self._vacate(slot, CANCELLED)

    def update(self, model: Decoder, *, recompute: bool = False) -> None:
        """Go on with other weights of the same shapes.

        Rows that are being decoded keep the keys and values of the old ones, or have them computed
        again. Which weights drew a token, its `versions` say.
        """
        self._source, self._weights = model, lay_out(model)
        self.version += 1
        self._prefixes.clear()
        if not self.active:
            self._empty()  # forget what weights that had diverged may have left
        for slot, row in enumerate(self._rows):
            if row is None:
                continue
            if recompute and slot not in self._filling:
                self._now.halt(slot)
                self._filling.append(slot)
            if slot in self._filling:  # a prompt half computed is begun anew in any case
                row.cached, row.version = 0, self.version
            else:
                row.version = None

    def follow(self, model: Decoder) -> None:
        """`update`, unless this is the model it has."""
        if model is not self._source:
            self.update(model)

    def _slot_of(self, id: Hashable) -> int | None:
        rows = enumerate(self._rows)
        return next((i for i, row in rows if row is not None and row.request.id == id), None)

    def _empty(self) -> None:
        model, limits = self._weights.model, self.limits
        dtype = model.norm.dtype if limits.cache_dtype is None else limits.cache_dtype
        room = _room_for(1, limits.room)
        self._slots = empty_slots(model.config, limits.slots, room, dtype)

    def _fit(self) -> None:
        """Room for the longest row, now and at the end of the next round."""
        more = self.limits.steps * (self.limits.guesses + 1)
        rows = [row for row in self._rows if row is not None]
        longest = max(min(len(row.tokens) + more, row.longest) for row in rows)
        room = _room_for(longest, self.limits.room)
        if room != self._slots.room:
            self._slots = refit(self._slots, room)

    def _fill(self) -> None:
        """Compute prompts, one after another, so that one that begins alike finds the other's; no
        more than `chunks` pieces while rows wait to be decoded.
        """
        chunks = 0
        while self._filling or self._admit():
            slot = self._filling[0]
            row = self._rows[slot]
            assert row is not None
            if not row.cached:
                self._restore(slot, row)
            if row.is_filled:
                self._start(slot, row)
            elif chunks < self.limits.chunks or not self._now.live.any():
                self._prefill(slot, row)
                chunks += 1
            else:
                return

    def _admit(self) -> bool:
        """Give the next request a free slot, if there are both."""
        if not self._waiting or None not in self._rows:
            return False
        request = self._waiting.pop(next(iter(self._waiting)))
        slot = self._rows.index(None)
        self._rows[slot] = Row(request, [int(t) for t in request.prompt], self.version)
        self._filling.append(slot)
        self._settings.assign(slot, request)
        self._now.assign(slot, request)
        return True

    def _restore(self, slot: int, row: Row) -> None:
        """Begin with what has been computed for another row."""
        row.cached, part = self._prefixes.longest(row.tokens[:-1])
        if part is None:
            return
        self._fit()
        room = self._slots.room
        part = part if part.room <= room else refit(part, room)
        self._slots = restore((jnp.int32(slot), part), self._slots)
        self.stats.reused += row.cached

    def _prefill(self, slot: int, row: Row) -> None:
        """Compute a piece of what is missing."""
        self._fit()
        begin, chunk = row.cached, self.limits.chunk
        piece = row.tokens[begin : min(begin + chunk, len(row.tokens) - 1)]
        sizes = (max(1, chunk // 4), max(1, chunk // 2), chunk)  # few programs, little padding
        size = next(n for n in sizes if n >= len(piece))
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(piece)] = piece
        fixed = (self._weights, jnp.int32(slot), jnp.asarray(tokens), jnp.full(1, begin, jnp.int32))
        self._slots = prefill_chunk(fixed, self._slots)
        row.cached += len(piece)
        self.stats.prefilled += len(piece)
        self.stats.programs.add(("prefill", self._slots.room, size))
        if row.is_filled:
            self._remember(slot, row)

    def _remember(self, slot: int, row: Row) -> None:
        """Keep what the slot holds for rows that begin like it."""
        if row.version == self.version and row.cached and self.limits.prefix_bytes:
            room = _room_for(row.cached, self._slots.room)
            part = copy_slot(self._slots, jnp.int32(slot), room)
            self._prefixes.add(row.tokens[: row.cached], part)

    def _start(self, slot: int, row: Row) -> None:
        """Let a row be decoded."""
        self._filling.remove(slot)
        self._now.start(slot, row.tokens)

    def _decode(self) -> list[Result]:
        """A round, and what it brought."""
        self._fit()
        limits, live = self.limits, np.flatnonzero(self._now.live)
        settings, filtered = self._settings, self._settings.leaves_out(live)
        if not filtered:
            settings = eqx.tree_at(lambda s: s.filters, settings, None)
        fixed = Round(
            weights=self._weights,
            settings=settings,
            stop=self._stop,
            eager=jnp.asarray(bool(self._waiting)),
            steps=limits.steps,
            guesses=limits.guesses,
            ngram=limits.ngram,
        )
        self._slots, *out = decode_round(fixed, self._slots, self._now)
        now, drawn, work = jax.device_get(out)
        self._now = jax.tree.map(np.array, now)  # copies: they are written to
        self.stats.steps += int(work.steps)
        self.stats.busy += int(work.busy)
        self.stats.drawn += int(drawn.counts.sum())
        self.stats.programs.add(("decode", self._slots.room, filtered))
        return [done for slot in live if (done := self._collect(int(slot), drawn)) is not None]

    def _collect(self, slot: int, drawn: Drawn) -> Result | None:
        """Add a round's tokens to a row: its result if it has ended."""
        row, count = self._rows[slot], int(drawn.counts[slot])
        assert row is not None
        row.tokens += drawn.tokens[slot, :count].tolist()
        row.logps += drawn.logps[slot, :count].tolist()
        row.versions += [self.version] * count
        row.cached = int(self._now.length[slot])
        if self._now.live[slot]:
            return None
        if row.request.remember:
            self._remember(slot, row)
        return self._vacate(slot, int(self._now.finish[slot]))

    def _vacate(self, slot: int, finish: int) -> Result:
        row = self._rows[slot]
        assert row is not None
        self._rows[slot] = None
        self._now.halt(slot)
        return row.result(finish)


def _room_for(tokens: int, most: int) -> int:
    """The smallest of few sizes that holds so many tokens."""
    room = SMALLEST
    while room < tokens:
        room *= 2
    return min(room, most)


def sampler(
    engine: Engine, sampling: Sampling, *, group: int = 1, remember: bool = False
) -> Callable[[KeyArray, Decoder, Prompts], Completions]:
    """(key, model, prompts) → completions: the engine in the place of `generate`."""

    def sample(key: KeyArray, model: Decoder, prompts: Prompts) -> Completions:
        engine.follow(model)
        requests = requests_for(key, prompts, sampling, group=group, remember=remember)
        results = engine.run(requests)
        return as_completions(results, group=group, max_tokens=sampling.max_tokens)

    return sample
