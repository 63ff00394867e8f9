"""One engine for many coroutines."""

import asyncio
from collections.abc import Hashable
from contextlib import suppress

from .engine import Engine
from .requests import CANCELLED, Request, Result, Row


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
        self._paused = False

    async def complete(self, request: Request) -> Result:
        """The request's result; whoever is cancelled while waiting for it cancels the request."""
        if self._paused:
            return Row(request, list(request.prompt)).result(CANCELLED)
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

    async def pause(self) -> None:
        """After the round that is under way, let all who wait, now or later, have what their
        requests have come to, as CANCELLED.
        """
        self._paused = True
        await self.drain()
        for id in list(self._futures):
            future, result = self._futures.pop(id), self.engine.cancel(id)
            if not future.done():
                future.set_result(result)

    async def drain(self) -> None:
        """Wait for the round that is under way, and cancel what nobody waits for."""
        if self._driver is not None:
            await self._driver
        self._exchange()

    async def _drive(self) -> None:
        """Rounds, as long as anybody waits for one."""
        try:
            while (self._futures or self._unwanted) and not self._paused:
                await asyncio.sleep(0)  # whoever is ready says what it wants
                self._exchange()
                for result in await asyncio.to_thread(self.engine.step):
                    future = self._futures.pop(result.id, None)
                    if future is None:
                        self._unwanted.remove(result.id)  # too late
                    elif not future.done():
                        future.set_result(result)
        except Exception as error:  # nobody waits for ever
            self._unwanted += self._futures
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
            with suppress(ValueError):  # a round that failed may have ended it
                self.engine.cancel(id)
