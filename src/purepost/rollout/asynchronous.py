"""Episodes of several turns with environments on the host, all under way at once: while some think,
the engine's slots are others'.

A row's random numbers belong to it and to the number of the token, not to the time at which it is
drawn: however long environments take, the same seed gives the same episodes (but for rounding), in
the same order.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from ..mean import Metrics
from ..models.decoder import Decoder
from ..types import KeyArray, Scalar
from .collect import Collect, Episodes, Grouped, Tasks
from .draw import Sampling
from .engine import Engine
from .environment import (
    ERROR,
    MAX_TURNS,
    TIMEOUT,
    Environment,
    Outcome,
    Tokens,
    as_earned,
    finish_metrics,
    settle,
)
from .requests import Request, Result, key_data
from .sample import LENGTH, STOP, pad_prompts

T = TypeVar("T")
Ids = list[int]


@dataclass(frozen=True)
class AsyncEnvironment:
    """An environment on the host: two coroutines, over token ids.

    `reset(key, task) → (state, observation)`, with one entry of each of the task's columns;
    `step(key, state, action) → (state, observation, reward, done)`. What they raise ends the
    episode, not the run.
    """

    reset: Callable[[KeyArray, dict[str, Any]], Awaitable[tuple[Any, Sequence[int]]]]
    step: Callable[[KeyArray, Any, Ids], Awaitable[tuple[Any, Sequence[int], float, bool]]]


def hosted(env: Environment, *, width: int) -> AsyncEnvironment:
    """An environment written in JAX, on the host; `width`: tokens of its longest turn."""
    reset_, step_ = eqx.filter_jit(env.reset), eqx.filter_jit(env.step)

    def ids_of(text: Tokens) -> Ids:
        return np.asarray(text.ids)[: int(text.length)].tolist()

    async def reset(key: KeyArray, task: dict[str, Any]) -> tuple[Any, Ids]:
        state, seen = reset_(key, task)
        return state, ids_of(seen)

    async def step(key: KeyArray, state: Any, action: Ids) -> tuple[Any, Ids, float, bool]:
        ids = jnp.asarray(action + [0] * (width - len(action)), jnp.int32)
        said = Tokens(ids, jnp.asarray(len(action), jnp.int32))
        state, seen, reward, done = step_(key, state, said)
        return state, ids_of(seen), float(reward), bool(done)

    return AsyncEnvironment(reset, step)


class SharedEngine:
    """An engine that coroutines share: each awaits its own completions.

    Rounds run in a thread of their own, so that the loop, and the environments on it, go on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._futures: dict[Hashable, asyncio.Future[Result]] = {}
        self._new: list[Request] = []
        self._unwanted: list[Hashable] = []
        self._driver: asyncio.Task[None] | None = None

    async def complete(self, request: Request) -> Result:
        """The request's result; whoever is cancelled while waiting for it cancels the request."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._futures[request.id] = future
        self._new.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        finally:
            if self._futures.pop(request.id, None) is not None:
                self._unwanted.append(request.id)

    async def drain(self) -> None:
        """Wait for the round that is under way, and cancel what nobody waits for."""
        if self._driver is not None:
            await self._driver
        self._exchange()

    async def _drive(self) -> None:
        """Rounds, as long as anybody waits for one."""
        try:
            while self._futures or self._unwanted:
                await asyncio.sleep(0)  # whoever is ready says what it wants
                self._exchange()
                for result in await asyncio.to_thread(self.engine.step):
                    future = self._futures.pop(result.id, None)
                    if future is None:
                        self._unwanted.remove(result.id)  # too late
                    elif not future.done():
                        future.set_result(result)
        except Exception as error:  # nobody waits for ever
            for id in list(self._futures):
                self._fail(id, error)

    def _fail(self, id: Hashable, error: Exception) -> None:
        """Let whoever waits for a request know, unless it was cancelled just now."""
        future = self._futures.pop(id)
        if not future.done():
            future.set_exception(error)

    def _exchange(self) -> None:
        """Between rounds: submit what is new, cancel what nobody waits for any more."""
        new, unwanted = self._new, self._unwanted
        self._new, self._unwanted = [], []
        for request in new:
            if request.id in unwanted:
                unwanted.remove(request.id)
                continue
            try:
                self.engine.submit(request)
            except ValueError as error:
                self._fail(request.id, error)
        for id in unwanted:
            self.engine.cancel(id)


@dataclass(frozen=True)
class _Rules:
    """What holds for every episode."""

    env: AsyncEnvironment
    sampling: Sampling
    max_turns: int
    max_tokens: int
    discount: float
    turn_seconds: float | None
    seconds: float | None


@dataclass
class _Episode:
    """What an episode has come to."""

    prompt: Ids
    tokens: Ids = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    total: float = 0.0
    turns: int = 0
    finish: int = ERROR
    begun: bool = False

    def say(self, result: Result) -> None:
        """What was sampled."""
        self.tokens += result.tokens.tolist()
        self.logps += result.logps.tolist()
        self.mask += [True] * len(result.tokens)
        self.rewards += [0.0] * len(result.tokens)

    def hear(self, seen: Ids) -> None:
        """What was not."""
        self.tokens += seen
        self.logps += [0.0] * len(seen)
        self.mask += [False] * len(seen)
        self.rewards += [0.0] * len(seen)


def asynchronous(
    engine: Engine,
    env: AsyncEnvironment,
    sampling: Sampling,
    *,
    group: int,
    max_turns: int,
    max_tokens: int,
    discount: Scalar = 1.0,
    outcome: Outcome = as_earned,
    turn_seconds: float | None = None,
    seconds: float | None = None,
) -> Collect:
    """`group` episodes of every task, as `multi_turn` has them, with an environment on the host.

    A group's episodes are reset with one key: they must begin alike. An environment that takes
    longer than `turn_seconds` for an answer, or an episode longer than `seconds` for all of them,
    ends with TIMEOUT; one that raises, or answers with what are no tokens or no finite reward,
    with ERROR; both are unscored. Every episode comes back, so groups are whole.
    """
    for name, n in dict(group=group, max_turns=max_turns, max_tokens=max_tokens).items():
        if n < 1:
            raise ValueError(f"expected {name} ≥ 1, got {n}")
    rules = _Rules(env, sampling, max_turns, max_tokens, float(discount), turn_seconds, seconds)

    def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        engine.follow(model)
        done = asyncio.run(_play_all(key, SharedEngine(engine), tasks, rules, group))
        episodes = _episodes(done, tasks, group, rules)
        turns = jnp.asarray([e.turns for e in done], jnp.int32)
        return settle(episodes, outcome), finish_metrics(episodes.finish, turns)

    return Grouped(collect, group)


async def _play_all(
    key: KeyArray, engine: SharedEngine, tasks: Tasks, rules: _Rules, group: int
) -> list[_Episode]:
    """The episodes of all tasks, group after group."""
    k_reset, k_sample, k_step = jr.split(key, 3)
    prompts, ids = tasks.prompts, np.asarray(tasks.prompts.ids)
    rows = jnp.asarray((ids[:, None] * group + np.arange(group, dtype=np.int32)).reshape(-1))
    each = lambda k, ids: list(jax.vmap(lambda i: jr.fold_in(k, i))(ids))  # noqa: E731
    resets, samples, steps = each(k_reset, prompts.ids), each(k_sample, rows), each(k_step, rows)
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    plays = []
    for n, (sample, step) in enumerate(zip(samples, steps, strict=True)):
        p = n // group
        task = {name: column[p] for name, column in tasks.columns.items()}
        episode = _Episode(tokens[p, : lengths[p]].tolist())
        plays.append(_play(n, episode, task, (resets[p], sample, step), engine, rules))
    under_way = [asyncio.ensure_future(play) for play in plays]
    try:
        return await asyncio.gather(*under_way)
    finally:  # nothing goes on behind an error
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await engine.drain()


async def _play(
    n: int,
    episode: _Episode,
    task: dict[str, Any],
    keys: tuple[KeyArray, KeyArray, KeyArray],
    engine: SharedEngine,
    rules: _Rules,
) -> _Episode:
    """An episode to its end, whatever that is."""
    try:
        async with asyncio.timeout(rules.seconds):
            episode.finish = await _take_turns(n, episode, task, keys, engine, rules)
    except TimeoutError:
        episode.finish = TIMEOUT
    except _Broken:
        episode.finish = ERROR
    return episode


async def _take_turns(
    n: int,
    episode: _Episode,
    task: dict[str, Any],
    keys: tuple[KeyArray, KeyArray, KeyArray],
    engine: SharedEngine,
    rules: _Rules,
) -> int:
    """Speak and be answered: why it ended."""
    k_reset, k_sample, k_step = keys
    state, seen = await _ask(rules, rules.env.reset(k_reset, task), _opening)
    episode.prompt += seen
    episode.begun = True
    while True:
        room = rules.max_tokens - len(episode.tokens)
        most = min(rules.sampling.max_tokens, room)
        request = Request(
            id=(n, episode.turns),
            prompt=episode.prompt + episode.tokens,
            key=key_data(k_sample),
            sampling=replace(rules.sampling, max_tokens=most),
            first=len(episode.tokens),
            remember=True,
        )
        said = await engine.complete(request)
        episode.say(said)
        turn = episode.turns
        episode.turns += 1
        answer = rules.env.step(jr.fold_in(k_step, turn), state, said.tokens.tolist())
        state, seen, reward, done = await _ask(rules, answer, _answer)
        episode.rewards[-1] = reward
        episode.total += rules.discount**turn * reward
        if done:
            return STOP
        if episode.turns == rules.max_turns:
            return MAX_TURNS
        if len(episode.tokens) + len(seen) >= rules.max_tokens:
            return LENGTH
        episode.hear(seen)


class _Broken(Exception):
    """The environment failed."""


async def _ask(rules: _Rules, call: Awaitable[Any], read: Callable[..., T]) -> T:
    """What the environment answers, in time and as it should be."""
    limit = asyncio.timeout(rules.turn_seconds)
    try:
        async with limit:
            return read(*await call)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise
        raise _Broken from error  # a TimeoutError of the environment's own too


def _ids(seen: Sequence[int]) -> Ids:
    ids = [int(t) for t in seen]
    if min(ids, default=0) < 0:
        raise ValueError(f"expected token ids, got {min(ids)}")
    return ids


def _opening(state: Any, seen: Sequence[int]) -> tuple[Any, Ids]:
    return state, _ids(seen)


def _answer(
    state: Any, seen: Sequence[int], reward: float, done: bool
) -> tuple[Any, Ids, float, bool]:
    if not math.isfinite(reward):
        raise ValueError(f"expected a finite reward, got {reward}")
    return state, _ids(seen), float(reward), bool(done)


def _episodes(done: Sequence[_Episode], tasks: Tasks, group: int, rules: _Rules) -> Episodes:
    """All episodes as arrays, as earned."""
    n, t = len(done), rules.max_tokens
    prompts = [_prompt_of(done[i : i + group], i // group) for i in range(0, n, group)]
    spoken = [len(e.mask) - e.mask[::-1].index(True) if any(e.mask) else 0 for e in done]

    def array(name: str, dtype: DTypeLike) -> Array:
        out = np.zeros((n, t), dtype)
        for row, episode, length in zip(out, done, spoken, strict=True):
            row[:length] = vars(episode)[name][:length]
        return jnp.asarray(out)

    failed = [e.finish in (ERROR, TIMEOUT) for e in done]
    rewards = [math.nan if f else e.total for e, f in zip(done, failed, strict=True)]
    # Greedy log-probabilities are taken at temperature 1.
    temperature = float(rules.sampling.temperature) or 1.0
    return Episodes(
        prompts=pad_prompts(prompts, ids=np.asarray(tasks.prompts.ids).tolist()),
        group=jnp.repeat(jnp.arange(n // group, dtype=jnp.int32), group),
        tokens=array("tokens", np.int32),
        lengths=jnp.asarray(spoken, jnp.int32),
        mask=array("mask", bool),
        logps=array("logps", np.float32),
        rewards=jnp.asarray(rewards, jnp.float32),
        finish=jnp.asarray([e.finish for e in done], jnp.int32),
        temperature=jnp.full(n, temperature, jnp.float32),
        step_rewards=array("rewards", np.float32),
    )


def _prompt_of(group: Sequence[_Episode], task: int) -> Ids:
    """What the episodes of a group begin with, but for those that never began."""
    prompts = [e.prompt for e in group if e.begun] or [group[0].prompt]
    if any(prompt != prompts[0] for prompt in prompts):
        raise ValueError(
            f"expected the episodes of a group to begin alike, got other first observations in "
            f"those of task {task}; draw what differs from the key of `reset`"
        )
    return prompts[0]
