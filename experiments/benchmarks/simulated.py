"""An asyncio loop of simulated time: where nothing is left to do, it jumps to the next timer.

Programs that sleep, wait and time out run at once and alike on every machine.
"""

import asyncio
import selectors
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Clock(selectors.SelectSelector):
    """Seconds that have passed. It is what an asyncio loop waits with: it does not."""

    def __init__(self) -> None:
        selectors.SelectSelector.__init__(self)
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; otherwise the time is over. Error: all wait, and nothing is due."""
        ready = selectors.SelectSelector.select(self, 0)
        if not ready and timeout is None:
            raise RuntimeError("expected a timer that all wait for, got none: a deadlock")
        self.now += 0.0 if ready or timeout is None else max(timeout, 0.0)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """A loop by this clock. What would run in a thread runs at once, and its result is there when
    what it did, by `work`, is over: seconds that all calls so far are to have taken.
    """

    def __init__(self, clock: Clock, work: Callable[[], float]) -> None:
        asyncio.SelectorEventLoop.__init__(self, clock)
        self._clock, self._work = clock, work

    def time(self) -> float:
        """Seconds of the simulated clock."""
        return self._clock.now

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """The function's result, after its time."""
        future, before = self.create_future(), self._work()
        result = func(*args)

        def finish() -> None:
            if not future.done():
                future.set_result(result)

        self.call_later(self._work() - before, finish)
        return future


@contextmanager
def simulated(work: Callable[[], float]) -> Iterator[Clock]:
    """Within, `asyncio.run` goes by a simulated clock: this one."""
    clock = Clock()
    with warnings.catch_warnings():
        # Python 3.14 deprecates policies: the way to a loop that somebody else runs.
        warnings.simplefilter("ignore", DeprecationWarning)
        before = asyncio.get_event_loop_policy()

        class Policy(asyncio.DefaultEventLoopPolicy):
            def new_event_loop(self) -> asyncio.AbstractEventLoop:
                return SimulatedLoop(clock, work)

        asyncio.set_event_loop_policy(Policy())
        try:
            yield clock
        finally:
            asyncio.set_event_loop_policy(before)
