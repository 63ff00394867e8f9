"""Environments that are Python objects: stateful, sync or async, slow, and apt to fail.

An open episode has an object of its own, and a thread or a process that makes all of its calls, so
that a call that raises, hangs or dies costs that episode and no other. A `Pool` runs a bounded
number of calls at a time. A call never raises: it gives a `Reply` or a `Failure`.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ..rollout.environment import ERROR, TIMEOUT
from .workers import Process, Reply, Thread


class Game(Protocol):
    """What an episode is played with; gymnasium's results of `reset` and `step` will do as well.

    An observation is a text, a list of messages, or what can be written as a text. The methods may
    be async; a method `close()`, where there is one, is called at the end.
    """

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        """Begin; the observation. Episodes of one group get the same task and seed."""
        ...

    def step(self, action: str) -> Any:
        """(observation, reward, done) after the policy's turn."""
        ...


@dataclass(frozen=True)
class Failure:
    """Why there is no reply."""

    finish: int  # TIMEOUT or ERROR
    why: str


class Pool:
    """Plays episodes of the environments that `make` makes, sync or async.

    At most `workers` calls run at a time. `step_timeout` is for one call, `episode_timeout` for an
    episode from its first call, both in seconds; `limit` (characters) for a message. A thread
    cannot be killed: one whose call is late is abandoned, and ends with the call or with the
    process. With `processes` each open episode has a process, which is killed: `make` must then be
    something that can be pickled. Threads and processes are kept for later episodes.
    """

    def __init__(
        self,
        make: Callable[[], Game | Awaitable[Game]],
        *,
        workers: int = 16,
        step_timeout: float | int = 30.0,
        episode_timeout: float | int = 600.0,
        limit: int = 20_000,
        processes: bool = False,
    ) -> None:
        if workers < 1 or limit < 1 or not (step_timeout > 0 and episode_timeout > 0):
            raise ValueError(
                "expected workers and limit ≥ 1 and time-outs > 0 s, got "
                f"{workers}, {limit}, {step_timeout}, {episode_timeout}"
            )
        self.make = make
        self.step_timeout = step_timeout
        self.episode_timeout = episode_timeout
        self.limit = limit
        self.kind = Process if processes else Thread
        self.idle: list[Thread | Process] = []
        self.supervisors = ThreadPoolExecutor(workers, thread_name_prefix="environment")

    def seat(self) -> "Seat":
        """A place for one episode."""
        return Seat(self)

    def close(self) -> None:
        """Wait for the calls that run, and end what is idle; the pool is of no use afterwards."""
        self.supervisors.shutdown()
        while self.idle:
            self.idle.pop().kill()


class Seat:
    """An episode's place; made by `Pool.seat`. Its calls are made one after another."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.deadline: float | None = None
        self.worker: Thread | Process | None = None
        self.failure: Failure | None = None
        self.lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Future[Reply | Failure]:
        """The answer to `reset(task, seed)` or `step(action)`, when there is one."""
        return self.pool.supervisors.submit(self._attempt, method, arguments)

    def close(self) -> None:
        """Let the environment go, once the calls before are over; harmless at any time."""
        self.pool.supervisors.submit(self._release)

    def _attempt(self, method: str, arguments: tuple[Any, ...]) -> Reply | Failure:
        with self.lock:
            if self.failure is not None:
                return self.failure
            if self.deadline is None:
                self.deadline = time.monotonic() + self.pool.episode_timeout
            try:
                if self.worker is None:
                    self.worker = self._hire()
                limit = min(self.pool.step_timeout, self.deadline - time.monotonic())
                if limit <= 0:
                    raise TimeoutError
                self.worker.send(method, arguments)
                return self.worker.receive(limit)
            except TimeoutError:
                return self._fail(TIMEOUT, f"{method} was late")
            except Exception as error:
                return self._fail(ERROR, str(error))

    def _hire(self) -> Thread | Process:
        try:
            return self.pool.idle.pop()
        except IndexError:
            return self.pool.kind(self.pool.make, self.pool.limit)

    def _fail(self, finish: int, why: str) -> Failure:
        self.failure = Failure(finish, why)
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()
        return self.failure

    def _release(self) -> None:
        with self.lock:
            worker, self.worker = self.worker, None
            self.failure = self.failure or Failure(ERROR, "the episode has been closed")
            if worker is None:
                return
            try:
                worker.send("close", ())
                worker.receive(self.pool.step_timeout)
            except (TimeoutError, RuntimeError):
                worker.kill()
            else:
                self.pool.idle.append(worker)
