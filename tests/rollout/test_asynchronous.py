"""Episodes collected at once: those of the fused loop, whatever the environments' latencies; and
nothing hangs, is lost or comes twice where they fail.
"""

import asyncio
import dataclasses
from typing import Any

import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purepost.environments.guess import guess
from purepost.models import Decoder
from purepost.rollout.asynchronous import AsyncEnvironment, SharedEngine, asynchronous, hosted
from purepost.rollout.collect import Collect, Episodes, Tasks
from purepost.rollout.draw import Sampling
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.environment import ERROR, MAX_TURNS, TIMEOUT
from purepost.rollout.multi_turn import multi_turn
from purepost.rollout.playing import Episode, Rules, Table, play_all, tickets
from purepost.rollout.requests import Request, key_data
from purepost.rollout.sample import LENGTH, STOP, pad_prompts
from purepost.types import KeyArray
from tests.compare import assert_same_bits
from tests.rollout.stubs import Drawing, clockwork, moody

KEY = jr.key(3)
SAMPLING = Sampling(3, stop_ids=(1,))
GAME = guess(4, first_id=4, higher_id=2, lower_id=3)
TASKS = Tasks(pad_prompts([[9, 5], [6], [7, 8, 9]], ids=[2, 5, 11], width=4))
RULES: dict[str, Any] = dict(group=4, max_turns=3, max_tokens=14)
LIMITS = Limits(slots=4, room=64, steps=3, chunk=16)


def episodes_of(collect: Collect, model: Decoder) -> Episodes:
    return collect(KEY, model, TASKS)[0]


def host(env: AsyncEnvironment, engine: Engine, **options: Any) -> Collect:
    return asynchronous(engine, env, SAMPLING, **RULES, **options)


def slow(env: AsyncEnvironment, seed: int) -> AsyncEnvironment:
    """The environment, after a time of its own."""
    rng = np.random.default_rng(seed)

    async def reset(key: KeyArray, task: dict[str, Any]) -> Any:
        await asyncio.sleep(rng.exponential(0.01))
        return await env.reset(key, task)

    async def step(key: KeyArray, state: Any, action: list[int]) -> Any:
        await asyncio.sleep(rng.exponential(0.01))
        return await env.step(key, state, action)

    return AsyncEnvironment(reset, step)


@pytest.fixture(scope="module")
def engine(model: Decoder) -> Engine:
    return Engine(model, LIMITS)


def test_episodes_are_those_of_the_fused_loop_whatever_the_latencies(
    model: Decoder, engine: Engine
) -> None:
    want = episodes_of(multi_turn(GAME, SAMPLING, **RULES), model)
    assert {STOP, MAX_TURNS} <= set(np.asarray(want.finish).tolist())
    for seed in (0, 1):
        got = episodes_of(host(slow(hosted(GAME, width=3), seed), engine), model)
        for name in ("group", "tokens", "lengths", "mask", "finish", "rewards", "step_rewards"):
            np.testing.assert_array_equal(vars(got)[name], vars(want)[name], err_msg=name)
        np.testing.assert_allclose(got.logps, want.logps, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(got.prompts.lengths, want.prompts.lengths)
        np.testing.assert_array_equal(got.prompts.tokens[:, :3], want.prompts.tokens[:, :3])
    assert engine.pending == 0
    assert engine.stats.reused > 0


def faulty(fault: Any, first: int) -> AsyncEnvironment:
    """An environment that goes wrong from its `first` answer on, in tasks whose prompt is 6."""
    inner = hosted(GAME, width=3)

    async def reset(key: KeyArray, task: dict[str, Any]) -> Any:
        state, seen = await inner.reset(key, {})
        return {"game": state, "bad": task["bad"], "turn": 0}, seen

    async def step(key: KeyArray, state: Any, action: list[int]) -> Any:
        game, *answer = await inner.step(key, state["game"], action)
        state = {**state, "game": game, "turn": state["turn"] + 1}
        if state["bad"] and state["turn"] > first:
            return await fault()
        return state, [2, 2, 2], 0.0, False

    return AsyncEnvironment(reset, step)


async def raises() -> Any:
    raise RuntimeError("broken")


async def raises_a_timeout() -> Any:
    raise TimeoutError("its own")


async def hangs() -> Any:
    await asyncio.sleep(60)


async def returns_none() -> Any:
    return None


async def returns_garbage() -> Any:
    return {}, ["higher"], 0.0, False


async def returns_nan() -> Any:
    return {}, [2], float("nan"), False


@pytest.mark.parametrize(
    ("fault", "finish"),
    [
        (raises, ERROR),
        (raises_a_timeout, ERROR),
        (hangs, TIMEOUT),
        (returns_none, ERROR),
        (returns_garbage, ERROR),
        (returns_nan, ERROR),
    ],
)
def test_an_environment_that_fails_costs_its_own_episodes_only(
    model: Decoder, engine: Engine, fault: Any, finish: int
) -> None:
    tasks = dataclasses.replace(TASKS, columns={"bad": [False, True, False]})
    collect = host(faulty(fault, 1), engine, turn_seconds=0.2)
    episodes, metrics = collect(KEY, model, tasks)
    assert episodes.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (np.asarray(episodes.finish[4:8]) == finish).all()
    assert np.isnan(episodes.rewards).tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert (np.asarray(episodes.finish)[[0, 1, 2, 3, 8, 9, 10, 11]] == MAX_TURNS).all()
    assert float(metrics["turns"].value) == pytest.approx((8 * 3 + 4 * 2) / 12)
    assert (episodes.lengths > 0).all() and engine.pending == 0


def test_an_episode_that_takes_too_long_is_cut(model: Decoder, engine: Engine) -> None:
    collect = host(faulty(hangs, 0), engine, seconds=0.3)
    tasks = dataclasses.replace(TASKS, columns={"bad": [True, True, True]})
    episodes, _ = collect(KEY, model, tasks)
    assert (np.asarray(episodes.finish) == TIMEOUT).all()
    assert engine.pending == 0


def test_a_group_that_does_not_begin_alike_is_an_error(model: Decoder, engine: Engine) -> None:
    inner, calls = hosted(GAME, width=3), iter(range(100))

    async def reset(key: KeyArray, task: dict[str, Any]) -> Any:
        return (await inner.reset(key, task))[0], [next(calls) % 7]

    with pytest.raises(ValueError, match="begin alike, got other first observations in those of"):
        episodes_of(host(AsyncEnvironment(reset, inner.step), engine), model)
    with pytest.raises(ValueError, match="expected group ≥ 1, got 0"):
        asynchronous(engine, inner, SAMPLING, group=0, max_turns=1, max_tokens=1)


def test_what_an_engine_refuses_ends_the_run_and_leaves_it_usable(
    model: Decoder, engine: Engine
) -> None:
    """More stop ids than it takes are the caller's fault, not the environment's."""
    env, many = hosted(GAME, width=3), Sampling(3, stop_ids=tuple(range(9)))
    with pytest.raises(ValueError, match="at most 8 stop ids, got 9"):
        episodes_of(asynchronous(engine, env, many, **RULES), model)
    assert engine.pending == 0
    with pytest.raises(ValueError, match="max_tokens < 64, the engine's room, got 64"):
        asynchronous(engine, env, SAMPLING, group=2, max_turns=9, max_tokens=64)
    with pytest.raises(ValueError, match="retries ≥ 0, got -1"):
        host(env, engine, retries=-1)


@pytest.mark.parametrize("first", [True, False])
def test_an_observation_that_leaves_no_room_ends_the_episode(
    model: Decoder, engine: Engine, first: bool
) -> None:
    """However long it is: it reaches no array."""
    inner = hosted(GAME, width=3)

    async def reset(key: KeyArray, task: dict[str, Any]) -> Any:
        return (await inner.reset(key, task))[0], [2] * (2**18 if first else 1)

    async def step(key: KeyArray, state: Any, action: list[int]) -> Any:
        return state, [2] * 2**18, 0.5, False

    episodes = episodes_of(host(AsyncEnvironment(reset, step), engine), model)
    assert (np.asarray(episodes.finish) == LENGTH).all()
    assert episodes.rewards.tolist() == [0.0 if first else 0.5] * 12
    assert episodes.tokens.shape == (12, 14) and episodes.prompts.tokens.shape == (3, 32)
    assert (np.asarray(episodes.mask.sum(1)) > 0).all() == (not first)


def test_whoever_stops_waiting_cancels_the_request(model: Decoder) -> None:
    engine = Engine(model, LIMITS)

    async def main() -> list[Any]:
        shared = SharedEngine(engine)
        ask = lambda i, n: shared.complete(  # noqa: E731
            Request(i, [3, i + 1], key_data(jr.key(i)), Sampling(n))
        )
        impatient = asyncio.ensure_future(ask(0, 60))
        others = [asyncio.ensure_future(ask(i, 9)) for i in range(1, 7)]
        await asyncio.sleep(0.01)
        impatient.cancel()
        done = await asyncio.gather(impatient, *others, return_exceptions=True)
        await shared.drain()
        return done

    first, *rest = asyncio.run(main())
    assert isinstance(first, asyncio.CancelledError)
    assert [len(r.tokens) for r in rest] == [9] * 6
    assert engine.pending == 0


def test_an_engine_that_fails_tells_all_who_wait_though_one_was_just_cancelled() -> None:
    class Failing(Engine):
        def __init__(self) -> None:
            """Nothing that it needs."""

        def step(self) -> list[Any]:
            raise RuntimeError("no memory")

    async def main() -> BaseException | None:
        shared = SharedEngine(Failing())
        gone, waiting = (asyncio.get_running_loop().create_future() for _ in range(2))
        gone.cancel()
        shared._futures |= {"gone": gone, "waiting": waiting}
        await shared._drive()
        return waiting.exception()

    assert str(asyncio.run(main())) == "no memory"


@given(st.integers(0, 2**16))
@settings(max_examples=4)
def test_time_changes_no_episode(model: Decoder, seed: int) -> None:
    """Environments that fail, hang and answer nonsense do so wherever and whenever they are asked;
    each is closed, once.
    """
    drawing, found = Drawing(), []
    for again in range(2):
        log: list[int] = []
        env = moody(np.random.default_rng([seed, again]), log)
        collect = asynchronous(drawing, env, SAMPLING, **RULES, turn_seconds=5.0, retries=again)
        with clockwork(drawing):
            found.append(collect(jr.key(seed), model, TASKS)[0])
        assert sum(log) == 0 and len(set(log)) == len(log)
    assert_same_bits(*found)
    assert found[0].prompts.ids.tolist() == [2, 5, 11] and not drawing.open


def test_a_run_that_is_cancelled_leaves_nothing_behind(model: Decoder) -> None:
    drawing, log = Drawing(), []
    env = moody(np.random.default_rng(0), log)
    rules = Rules(env, SAMPLING, 4, 3, 14, 1.0, None, None, 0)

    async def main() -> None:
        games = [Episode(ticket) for ticket in tickets(KEY, TASKS, 4)]
        run = asyncio.ensure_future(play_all(games, Table(SharedEngine(drawing), rules)))
        await asyncio.sleep(1.0)
        assert drawing.open and sum(log) > 0
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    with clockwork(drawing):
        asyncio.run(main())
    assert sum(log) == 0 and not drawing.open
