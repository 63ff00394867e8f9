"""An engine without a model, and environments that behave as their keys say: for tests of
schedules.
"""

import asyncio
import itertools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.random as jr
import numpy as np

from experiments.benchmarks.simulated import simulated
from purepost.models import Decoder
from purepost.rollout.async_environment import AsyncEnvironment
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.requests import CANCELLED, Request, Result
from purepost.rollout.sample import LENGTH, STOP
from purepost.types import KeyArray

ROUND = 0.1  # seconds


class Drawing(Engine):
    """Draws tokens that the request's key and their numbers decide on, two in a round, in so many
    slots.
    """

    def __init__(self, slots: int = 4) -> None:
        self.limits = Limits(slots=slots, room=64)
        self.open: dict[Hashable, tuple[Request, list[int]]] = {}
        self.rounds = 0

    def follow(self, model: Decoder) -> None:
        assert not self.open

    def submit(self, request: Request) -> None:
        assert request.id not in self.open
        self.open[request.id] = request, []

    def cancel(self, id: Hashable) -> Result:
        if id not in self.open:
            raise ValueError("expected the id of a request that has not ended")
        return self._result(id, CANCELLED)

    def step(self) -> list[Result]:
        self.rounds += 1
        done = []
        for id, (request, drawn) in list(self.open.items())[: self.limits.slots]:
            for _ in range(2):
                drawn.append(token_of(request, request.first + len(drawn)))
                if drawn[-1] in request.sampling.stop_ids:
                    done.append(self._result(id, STOP))
                    break
                if len(drawn) == request.sampling.max_tokens:
                    done.append(self._result(id, LENGTH))
                    break
        return done

    def _result(self, id: Hashable, finish: int) -> Result:
        _, drawn = self.open.pop(id)
        tokens = np.asarray(drawn, np.int32)
        return Result(id, tokens, (tokens / -8).astype(np.float32), tokens * 0, finish)


def token_of(request: Request, n: int) -> int:
    return int(np.random.default_rng([*request.key.tolist(), n]).integers(1, 9))


@contextmanager
def clockwork(engine: Drawing) -> Iterator[None]:
    """Simulated time, in which a round takes its own."""
    with simulated(lambda: engine.rounds * ROUND):
        yield


def moody(delays: np.random.Generator, log: list[int] | None = None) -> AsyncEnvironment:
    """Its answers, and its faults, are its key's affair; how long it takes is drawn here. The log
    has a number for each that was begun, and the same below 0 for each that was closed.
    """
    log, numbers = [] if log is None else log, itertools.count(1)

    async def reset(key: KeyArray, task: dict[str, Any]) -> Any:
        await asyncio.sleep(delays.exponential(0.5))
        mood = np.random.default_rng(np.asarray(jr.key_data(key)).tolist())
        if mood.random() < 0.1:
            raise RuntimeError("no mood")
        log.append(next(numbers))
        return log[-1], [int(mood.integers(1, 9))]

    async def step(key: KeyArray, state: Any, action: list[int]) -> Any:
        await asyncio.sleep(delays.exponential(0.5))
        mood = np.random.default_rng(np.asarray(jr.key_data(key)).tolist())
        seen = mood.integers(1, 9, int(mood.integers(3))).tolist()
        match int(mood.integers(16)):
            case 0:
                raise ConnectionError("as drawn")
            case 1:
                await asyncio.sleep(1e6)
            case 2:
                return None
            case 3:
                return state, ["garbage"], 0.0, False
            case 4:
                return state, [2] * 2**20, 1.0, False
            case 5 | 6 | 7:
                return state, seen, 1.0, True
        return state, seen, float(sum(action) % 3), False

    return AsyncEnvironment(reset, step, lambda state: log.append(-state))
