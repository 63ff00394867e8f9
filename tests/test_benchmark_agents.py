"""The agents' benchmark: its clock, and what it claims."""

import asyncio
import json

import jax.random as jr
import numpy as np
import pytest

from experiments.benchmarks.agents import MODEL, Found, Work, line, measure
from experiments.benchmarks.simulated import simulated
from purepost.models import init_decoder

SMALL = Work(tasks=3, turns=15, tokens=6, slots=4, step=0.07, shortest=0.3, longest=8.0)


def test_the_simulated_clock_jumps_to_the_next_timer() -> None:
    moments, worked = [], [0.0]

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        moments.append(asyncio.get_running_loop().time())

    def work() -> str:
        worked[0] += 1000.0
        return "done"

    async def program() -> str:
        await asyncio.gather(sleep(300.0), sleep(20.5), sleep(0.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50.0):
                await sleep(60.0)
        return await asyncio.to_thread(work)

    policy = asyncio.get_event_loop_policy()
    with simulated(lambda: worked[0]) as clock:
        assert asyncio.run(program()) == "done"
    assert moments == [0.0, 20.5, 300.0]
    assert clock.now == pytest.approx(300.0 + 50.0 + 1000.0)
    assert asyncio.get_event_loop_policy() is policy


def test_a_deadlock_is_an_error() -> None:
    async def program() -> None:
        await asyncio.Event().wait()

    with simulated(lambda: 0.0), pytest.raises(RuntimeError, match="deadlock"):
        asyncio.run(program())


@pytest.fixture(scope="module")
def found() -> tuple[Found, Found]:
    """Asynchronously, and in step."""
    model = init_decoder(jr.key(0), MODEL)
    return measure(model, SMALL, together=False), measure(model, SMALL, together=True)


def test_slow_environments_leave_the_engine_busy_where_nobody_waits_for_others(
    found: tuple[Found, Found],
) -> None:
    ours, in_step = found
    assert ours.busy >= 0.9 and in_step.busy < 0.5
    assert ours.slots_busy > 0.8


def test_both_ways_play_the_same_episodes(found: tuple[Found, Found]) -> None:
    ours, in_step = found
    assert sorted(ours.answers) == sorted(in_step.answers)
    assert len(ours.answers) == SMALL.episodes * SMALL.turns
    np.testing.assert_array_equal(ours.episodes.tokens, in_step.episodes.tokens)
    np.testing.assert_array_equal(ours.episodes.mask, in_step.episodes.mask)


def test_in_step_a_turn_lasts_as_long_as_its_slowest_answer(found: tuple[Found, Found]) -> None:
    _, in_step = found
    answers = np.asarray(in_step.answers).reshape(SMALL.turns, SMALL.episodes)
    waited = answers.max(1).sum()
    assert in_step.seconds * (1 - in_step.busy) == pytest.approx(waited, rel=1e-6)


def test_answers_have_the_distribution_that_is_named(found: tuple[Found, Found]) -> None:
    """P(x > s) = (shortest/s)^shape."""
    answers = np.asarray(found[0].answers)
    assert answers.min() >= SMALL.shortest
    for seconds in (0.5, 1.0):
        want = (SMALL.shortest / seconds) ** SMALL.shape
        assert (answers > seconds).mean() == pytest.approx(want, abs=0.1)


def test_a_line_is_json(found: tuple[Found, Found]) -> None:
    told = line("asynchronous", found[0], SMALL)
    assert json.loads(json.dumps(told)) == told
    assert told["busy"] == round(found[0].busy, 4) and told["episodes"] == 24
