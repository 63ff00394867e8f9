"""Environments in Python that raise, hang, die, or answer nonsense, in threads and in processes."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from purepost.environments.host import Failure, Pool, Seat
from purepost.environments.workers import Process, Reply
from purepost.rollout.environment import ERROR, TIMEOUT
from tests.environments.scripted import Asynchronous, Gym, Scripted


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(Scripted, step_timeout=1.0, limit=100)
    yield pool
    pool.close()


def play(pool: Pool, *script: Any, turns: int = 4) -> tuple[Seat, list[Any]]:
    """The replies to a reset and to steps, up to the first that ends the episode."""
    seat = pool.seat()
    replies: list[Any] = [seat.call("reset", {"script": script}, 7).result()]
    for _ in range(turns):
        if isinstance(replies[-1], Failure) or replies[-1].done:
            break
        replies.append(seat.call("step", "hello").result())
    seat.close()
    return seat, replies


def test_an_episode(pool: Pool) -> None:
    _, replies = play(pool, 0, 0.25, -1, "done")
    user = lambda text: ({"role": "user", "content": text},)  # noqa: E731
    assert replies == [
        Reply(user("w10")),
        Reply(user("w12"), 0.25),
        Reply(user("w13"), -1.0),
        Reply((), 1.0, True),
    ]


@pytest.mark.parametrize(
    ("act", "finish", "why"),
    [
        ("raise", ERROR, "ZeroDivisionError: as asked"),
        ("exit", ERROR, "SystemExit"),
        ("hang", TIMEOUT, "step was late"),
        ("none", ERROR, "expected an observation, got None"),
        ("nothing", ERROR, "expected .observation, reward, done. .* got NoneType"),
        ("garbage", ERROR, "got dict"),
        ("nan", ERROR, "expected a finite reward"),
        ("words", ERROR, "could not convert string"),
        ("assistant", ERROR, "of role 'assistant'"),
    ],
)
def test_what_goes_wrong_ends_the_episode_and_no_other(
    pool: Pool, act: str, finish: int, why: str
) -> None:
    start = time.monotonic()
    seat, (first, last) = play(pool, 0, act)
    assert isinstance(first, Reply) and isinstance(last, Failure)
    assert last.finish == finish
    assert re.search(why, last.why)
    assert seat.call("step", "again").result() == last
    assert isinstance(play(pool, 0, "done")[1][-1], Reply)
    assert time.monotonic() - start < 5


def test_resets_fail_like_steps(pool: Pool) -> None:
    for act, finish in (("raise", ERROR), ("hang", TIMEOUT), ("nothing", ERROR)):
        _, (only,) = play(pool, act)
        assert isinstance(only, Failure) and only.finish == finish


def test_a_megabyte_is_cut(pool: Pool) -> None:
    _, (_, reply, _) = play(pool, 0, "megabyte", "done")
    text = reply.messages[0]["content"]
    assert text.startswith("w12 w12") and text.endswith(f"… ({4 * 2**18 - 100} characters more)")


def test_calls_run_beside_one_another_and_no_more_than_asked() -> None:
    pool = Pool(Scripted, workers=4, step_timeout=5)
    seats = [pool.seat() for _ in range(8)]
    for seat in seats:
        seat.call("reset", {"script": [0, ("slow", 0.2)]}, 0).result()
    start = time.monotonic()
    steps = [seat.call("step", "") for seat in seats]
    assert [s.result() for s in steps] == [Reply(({"role": "user", "content": "w12"},))] * 8
    assert 0.4 <= time.monotonic() - start < 1.5  # two rounds of four
    pool.close()


def test_an_episode_has_a_time_limit_too() -> None:
    pool = Pool(Scripted, step_timeout=5, episode_timeout=0.3)
    _, replies = play(pool, 0, ("slow", 0.2), ("slow", 0.2), 0)
    assert [type(r) for r in replies] == [Reply, Reply, Failure]
    assert replies[-1].finish == TIMEOUT
    pool.close()


def test_threads_are_kept_for_later_episodes(pool: Pool) -> None:
    for _ in range(5):
        play(pool, 0, "done")
        time.sleep(0.05)
    assert len(pool.idle) == 1
    play(pool, 0, "hang")
    time.sleep(0.05)
    assert not pool.idle


def test_async_environments_keep_their_loop() -> None:
    pool = Pool(Asynchronous, step_timeout=0.5)
    _, replies = play(pool, 0, 1, 2, "done")
    assert [r.reward for r in replies] == [0, 1, 2, 1]
    assert play(pool, 0, "hang")[1][-1].finish == TIMEOUT
    pool.close()


def test_gymnasiums_results_will_do() -> None:
    pool = Pool(Gym)
    _, replies = play(pool)
    assert replies == [Reply(({"role": "user", "content": "7"},)), Reply((), 0.5, True)]
    pool.close()


def test_processes_are_killed_when_they_hang_or_die() -> None:
    pool = Pool(Scripted, step_timeout=1.0, processes=True)
    _, replies = play(pool, 0, 0.5, "done")
    assert [r.reward for r in replies] == [0, 0.5, 1]
    time.sleep(0.2)
    (kept,) = pool.idle
    assert isinstance(kept, Process)
    process = kept.process
    assert play(pool, 0, "hang")[1][-1].finish == TIMEOUT
    assert not process.is_alive()
    last = play(pool, 0, "die")[1][-1]
    assert last.finish == ERROR and "has died" in last.why
    pool.close()


def test_limits_must_be_positive() -> None:
    for name, wrong in {"workers": 0, "limit": 0, "step_timeout": 0, "episode_timeout": -1}.items():
        given: dict[str, Any] = {name: wrong}
        with pytest.raises(ValueError, match="expected workers and limit ≥ 1"):
            Pool(Scripted, **given)
