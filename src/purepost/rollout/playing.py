"""How an episode with an environment on the host is played: turn by turn, by a coroutine that may
stop anywhere, and go on later, or in another process.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Int, UInt32

from ..types import KeyArray
from .async_environment import AsyncEnvironment, Ids, Late
from .collect import Tasks
from .draw import Sampling
from .environment import ERROR, MAX_TURNS, TIMEOUT
from .requests import Request
from .sample import LENGTH, STOP
from .shared_engine import SharedEngine
from .transcript import Answer, Transcript, answer_of

Name = tuple[int, int]  # the collection that an episode began in, and which of its episodes it is


@dataclass(frozen=True)
class Rules:
    """What holds for every episode. Lengths in tokens, times in seconds."""

    env: AsyncEnvironment
    sampling: Sampling
    group: int
    max_turns: int
    max_tokens: int
    discount: float
    turn_seconds: float | int | None
    seconds: float | int | None
    retries: int

    def check(self, room: int) -> None:
        """Errors: numbers out of range; more tokens than a slot of the engine has room for."""
        for name, least in dict(group=1, max_turns=1, max_tokens=1, retries=0).items():
            if vars(self)[name] < least:
                raise ValueError(f"expected {name} ≥ {least}, got {vars(self)[name]}")
        if self.max_tokens >= room:
            raise ValueError(
                f"expected max_tokens < {room}, the engine's room, got {self.max_tokens}; lower "
                "it, or raise Limits.room"
            )


@dataclass(frozen=True)
class Ticket:
    """What an episode begins from: plain data."""

    name: Name
    prompt: Ids
    task: dict[str, Any]
    reset: UInt32[np.ndarray, " w"]  # data of its keys
    sample: UInt32[np.ndarray, " w"]
    step: UInt32[np.ndarray, " w"]


@dataclass
class Episode:
    """An episode, and all that it takes to go on with it: plain data."""

    ticket: Ticket
    script: Transcript = field(default_factory=Transcript)
    attempts: int = 1


@dataclass
class Game:
    """An episode's environment: what is no plain data."""

    state: Any = None
    open: bool = False  # there is a state
    answers: int | None = None  # to turns, that were taken note of; None: not even the first
    call: asyncio.Task[Answer] | None = None  # what it is thinking about
    waited: float = 0.0  # seconds for this answer
    seconds: float = 0.0  # for all

    def let_go(self, env: AsyncEnvironment) -> None:
        """End it, whatever it does, and be as new."""
        if self.call is not None:
            self.call.cancel()
        if self.open:
            with suppress(Exception):  # nobody waits for what it says
                env.close(self.state)
        vars(self).update(vars(Game()))


@dataclass
class Table:
    """What the episodes of one collection share."""

    engine: SharedEngine
    rules: Rules
    version: int = 0  # of the policy
    budget: int | None = None  # tokens that each may draw
    closing: asyncio.Future[None] | None = None  # done: stop where you are

    @property
    def room(self) -> int:
        """Tokens of the longest text: what is longer is not kept either."""
        return self.engine.engine.limits.room


class _Broken(Exception):
    """The environment failed."""


class _Paused(Exception):
    """The table is closing."""


def tickets(key: KeyArray, tasks: Tasks, group: int, *, collection: int = 0) -> list[Ticket]:
    """Those of all tasks, group after group. A group's episodes are reset with one key."""
    k_reset, k_sample, k_step = jr.split(key, 3)
    ids = np.asarray(tasks.prompts.ids)
    rows = (ids[:, None] * group + np.arange(group, dtype=np.int32)).reshape(-1)

    def each(key: KeyArray, ids: Int[np.ndarray, " n"]) -> UInt32[np.ndarray, "n w"]:
        return np.asarray(jr.key_data(jax.vmap(lambda i: jr.fold_in(key, i))(jnp.asarray(ids))))

    resets, samples, steps = each(k_reset, ids), each(k_sample, rows), each(k_step, rows)
    tokens, lengths = np.asarray(tasks.prompts.tokens), np.asarray(tasks.prompts.lengths)
    made = []
    for n, (sample, step) in enumerate(zip(samples, steps, strict=True)):
        p = n // group
        task = {name: column[p] for name, column in tasks.columns.items()}
        prompt = tokens[p, : lengths[p]].tolist()
        made.append(Ticket((collection, n), prompt, task, resets[p], sample, step))
    return made


async def play_all(episodes: Iterable[Episode], table: Table) -> None:
    """All episodes to their ends. Nothing goes on behind an error."""
    under_way = [asyncio.ensure_future(play(episode, Game(), table)) for episode in episodes]
    try:
        await asyncio.gather(*under_way)
    finally:
        await abandon(under_way, table)


async def abandon(under_way: Iterable[asyncio.Task[None]], table: Table) -> None:
    """Cancel whoever still plays, and all requests."""
    under_way = list(under_way)
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    await table.engine.drain()


async def play(episode: Episode, game: Game, table: Table) -> None:
    """Go on with an episode until it ends, has drawn its budget, or the table closes.

    One whose environment fails begins anew, with the keys it had, as often as the rules allow.
    """
    limit = None if table.budget is None else episode.script.drawn + table.budget
    paused = False
    try:
        while episode.script.finish is None and not paused:
            try:
                end = await _take_turns(episode, game, table, limit)
            except Late:
                end = TIMEOUT
            except _Broken:
                end = ERROR
            except _Paused:
                end = None
            paused = end is None
            if end in (ERROR, TIMEOUT) and episode.attempts <= table.rules.retries:
                game.let_go(table.rules.env)
                limit = None if limit is None else limit - episode.script.drawn
                episode.script = Transcript()
                episode.attempts += 1
            else:
                episode.script.finish = end
    finally:
        if not paused:
            game.let_go(table.rules.env)


async def _take_turns(episode: Episode, game: Game, table: Table, limit: int | None) -> int | None:
    """Speak and be answered: why it ended, or None if it is to go on.

    What was said before to another environment is said again, and has to be answered alike.
    """
    rules, script, ticket = table.rules, episode.script, episode.ticket
    if game.answers is None:
        opening = await _ask(game, table, lambda: _reset(ticket, game, table))
        game.answers = 0
        if script.opening is None:
            script.begin(ticket.prompt, opening)
        _check_same(script.opening, opening)
    while True:
        n = game.answers
        if n == len(script.turns) or not script.turns[n].over:
            room = _room(script, table)
            if room < 1:
                return LENGTH
            if not await _speak(episode, table, room, limit):
                return None
        turn = script.turns[n]
        call = partial(_step, ticket, game, table, n, turn.tokens)
        answer = await _ask(game, table, call)
        game.answers = n + 1
        if turn.answer is not None:
            _check_same(turn.answer, answer)
            continue
        script.hear(turn, answer, rules.discount)
        if answer.done:
            return STOP
        if len(script.turns) == rules.max_turns:
            return MAX_TURNS


def _room(script: Transcript, table: Table) -> int:
    """Tokens that the turn may have yet."""
    rules, text = table.rules, len(script.text)
    return min(
        rules.sampling.max_tokens - script.spoken,
        rules.max_tokens - (text - len(script.prompt)),
        table.room - text,
    )


async def _speak(episode: Episode, table: Table, room: int, limit: int | None) -> bool:
    """A turn, or more of it: whether it is over."""
    script = episode.script
    most = room if limit is None else min(room, limit - script.drawn)
    if most < 1:
        return False
    request = Request(
        id=(episode.ticket.name, episode.attempts, script.count),
        prompt=script.text,
        key=episode.ticket.sample,
        sampling=replace(table.rules.sampling, max_tokens=most),
        first=script.count,
        remember=True,
    )
    said = await table.engine.complete(request)
    if not len(said.tokens):
        return False
    turn = script.say(said.tokens.tolist(), said.logps.tolist(), table.version)
    turn.over = said.finish == STOP or (said.finish == LENGTH and most == room)
    return turn.over


async def _reset(ticket: Ticket, game: Game, table: Table) -> Answer:
    """The environment's first observation."""
    key = jr.wrap_key_data(jnp.asarray(ticket.reset))
    game.state, seen = await table.rules.env.reset(key, ticket.task)
    game.open = True
    return answer_of(seen, most=table.room)


async def _step(ticket: Ticket, game: Game, table: Table, n: int, said: Ids) -> Answer:
    """Its answer to the turn n."""
    key = jr.fold_in(jr.wrap_key_data(jnp.asarray(ticket.step)), n)
    game.state, seen, reward, done = await table.rules.env.step(key, game.state, list(said))
    if not math.isfinite(reward):
        raise ValueError(f"expected a finite reward, got {reward}")
    return answer_of(seen, reward, done, most=table.room)


async def _ask(game: Game, table: Table, call: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
    """What the environment answers, in time. Where the table closes first, it thinks on."""
    if game.call is None:
        game.call, game.waited = asyncio.ensure_future(call()), 0.0
    rules, clock = table.rules, asyncio.get_running_loop().time
    limits = (rules.turn_seconds, game.waited), (rules.seconds, game.seconds)
    left = min((most - spent for most, spent in limits if most is not None), default=None)
    waiting: Sequence[asyncio.Future[Any]] = [game.call]
    if table.closing is not None:
        waiting = [game.call, table.closing]
    begun = clock()
    await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    game.waited += clock() - begun
    game.seconds += clock() - begun
    if not game.call.done():
        raise _Paused if table.closing is not None and table.closing.done() else Late
    done, game.call = game.call, None
    try:
        return done.result()
    except Late:
        raise
    except (Exception, asyncio.CancelledError) as error:  # a TimeoutError of its own too
        raise _Broken from error


def _check_same(before: Answer | None, now: Answer) -> None:
    """Error: an answer that is not the one given before."""
    if before != now:
        raise _Broken("expected an environment that repeats itself, got another answer")
