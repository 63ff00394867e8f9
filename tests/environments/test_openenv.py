"""Environments of OpenEnv on a server in this process, by its own clients.

It brings some dozens of packages: `pip install '.[openenv]'` has these tests run.
"""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from purepost.environments.host import Failure, Pool
from purepost.environments.openenv import OpenEnv, as_text
from purepost.environments.workers import Reply
from purepost.rollout.environment import ERROR

core = pytest.importorskip("openenv.core")
uvicorn = pytest.importorskip("uvicorn")

# Of the server's own libraries.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Guess(core.Action):
    """A number."""

    number: int


class Hint(core.Observation):
    """What is known of the hidden number."""

    hint: str


class Guessing(core.Environment):
    """Find the number that the seed hides, of `most`; three guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, most: int = 10, **_: Any
    ) -> Hint:
        """Hide one."""
        self.hidden, self.left = (seed or 0) % most, 3
        return Hint(hint=f"below {most}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Compare."""
        if action.number < 0:
            raise ValueError("no such number")
        self.left -= 1
        right = action.number == self.hidden
        hint = "higher" if action.number < self.hidden else "lower"
        reward = 1.0 if right else None
        return Hint(hint=hint, done=right or self.left == 0, reward=reward)

    @property
    def state(self) -> Any:
        """Asked for by the server."""
        return core.State(step_count=3 - self.left)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    app = core.create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def number(text: str) -> dict[str, Any]:
    return {"number": int(text)}


@pytest.fixture
def pool(address: str) -> Iterator[Pool]:
    pool = Pool(lambda: OpenEnv(lambda: core.GenericEnvClient(address), act=number))
    yield pool
    pool.close()


def told(reply: Any) -> Any:
    assert isinstance(reply, Reply), reply
    return json.loads(reply.messages[0]["content"])


def test_an_episode(pool: Pool) -> None:
    seat = pool.seat()
    assert told(seat.call("reset", {"most": 6}, 17).result()) == {"hint": "below 6"}
    low = seat.call("step", "3").result()
    assert told(low) == {"hint": "higher"}
    assert isinstance(low, Reply) and (low.reward, low.done) == (0, False)
    assert seat.call("step", " 5\n").result() == Reply((), 1.0, True)
    seat.close()
    lost = pool.seat()
    assert told(lost.call("reset", {"most": None}, 17).result()) == {"hint": "below 10"}
    ends = [lost.call("step", "8").result() for _ in range(3)]
    assert [isinstance(r, Reply) and (r.reward, r.done) for r in ends] == [
        (0, False),
        (0, False),
        (0, True),
    ]
    lost.close()


def test_sessions_are_apart(pool: Pool) -> None:
    seats = [pool.seat() for _ in range(4)]
    for seed, seat in enumerate(seats):
        assert told(seat.call("reset", {}, seed).result()) == {"hint": "below 10"}
    calls = [seat.call("step", str(seed)) for seed, seat in enumerate(seats)]
    assert [call.result() for call in calls] == [Reply((), 1.0, True)] * 4
    for seat in seats:
        seat.close()


@pytest.mark.parametrize(("said", "why"), [("-1", "no such number"), ("two", "invalid literal")])
def test_errors_are_the_episodes_own(pool: Pool, said: str, why: str) -> None:
    seat, other = pool.seat(), pool.seat()
    for each in (seat, other):
        each.call("reset", {}, 2).result()
    last = seat.call("step", said).result()
    assert isinstance(last, Failure) and last.finish == ERROR and why in last.why
    assert other.call("step", "2").result() == Reply((), 1.0, True)
    other.close()


def test_a_server_that_is_not_there() -> None:
    pool = Pool(lambda: OpenEnv(lambda: core.GenericEnvClient("http://127.0.0.1:9"), act=number))
    last = pool.seat().call("reset", {}, 0).result()
    assert isinstance(last, Failure) and "Failed to connect" in last.why
    pool.close()


def test_typed_observations_show_the_same() -> None:
    assert (
        as_text(Hint(hint="é", reward=1.0, done=True)) == as_text({"hint": "é"}) == '{"hint": "é"}'
    )
