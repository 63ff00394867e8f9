"""A thread or a process that makes the calls of one environment after another, and brings what they
give into one shape.
"""

import asyncio
import inspect
import math
import multiprocessing
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]
Answer = tuple[bool, Any]  # (True, result), or (False, what was raised, in words)
STARTS = 60.0  # seconds that a process may take to start


@dataclass(frozen=True)
class Reply:
    """What an environment answered; nothing of the observation behind the last turn."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False


@runtime_checkable
class Closes(Protocol):
    """What wants to be closed."""

    def close(self) -> Any:
        """Let everything go."""
        ...


def serve(
    make: Callable[[], Any], limit: int, take: Callable[[], Any], give: Callable[[Answer], None]
) -> None:
    """Make the calls that `take` brings, (method, arguments), until it brings None, and give a
    `Reply` for each: to "reset", which has a new environment made, "step" and "close".
    """
    game: Any = None
    with asyncio.Runner() as runner:

        def finished(value: Any) -> Any:
            async def waited() -> Any:
                return await value

            return runner.run(waited()) if inspect.isawaitable(value) else value

        def perform(method: str, arguments: tuple[Any, ...]) -> Reply:
            nonlocal game
            if method == "step":
                return _answered(finished(game.step(*arguments)), limit)
            before, game = game, None
            if isinstance(before, Closes):
                finished(before.close())
            if method == "close":
                return Reply()
            game = finished(make())
            return _begun(finished(game.reset(*arguments)), limit)

        while (call := take()) is not None:
            try:
                answer: Answer = (True, perform(*call))
            except BaseException as error:  # SystemExit too is the environment's affair
                answer = (False, f"{type(error).__name__}: {error}")
            try:
                give(answer)
            except Exception as error:  # what cannot be pickled
                give((False, f"the answer cannot be sent: {error}"))


class Thread:
    """A thread of this process."""

    def __init__(self, make: Callable[[], Any], limit: int) -> None:
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        given = (make, limit, self.calls.get, self.answers.put)
        threading.Thread(target=serve, args=given, daemon=True).start()

    def send(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Have a call made."""
        self.calls.put((method, arguments))

    def receive(self, timeout: float | int) -> Reply:
        """The reply to the last call. Errors: TimeoutError; RuntimeError for what it raised."""
        try:
            return _good(self.answers.get(timeout=timeout))
        except queue.Empty as error:
            raise TimeoutError from error

    def kill(self) -> None:
        """End after the calls that were made: a thread cannot be killed."""
        self.calls.put(None)


class Process:
    """A process of its own."""

    def __init__(self, make: Callable[[], Any], limit: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork copies locks that others hold
        self.pipe, inside = context.Pipe()
        given = (make, limit, inside)
        self.process = context.Process(target=serve_pipe, args=given, daemon=True)
        self.process.start()
        inside.close()
        self.receive(STARTS)

    def send(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Have a call made."""
        try:
            self.pipe.send((method, arguments))
        except OSError as error:
            raise RuntimeError("the environment's process has died") from error

    def receive(self, timeout: float | int) -> Reply:
        """The reply to the last call. Errors: TimeoutError; RuntimeError for what it raised."""
        try:
            if not self.pipe.poll(timeout):
                raise TimeoutError
            return _good(self.pipe.recv())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("the environment's process has died") from error

    def kill(self) -> None:
        """End now."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve_pipe(make: Callable[[], Any], limit: int, pipe: Connection) -> None:
    """What a process does."""

    def take() -> Any:
        try:
            return pipe.recv()
        except EOFError:  # the trainer has gone
            return None

    pipe.send((True, Reply()))
    serve(make, limit, take, pipe.send)


def _good(answer: Answer) -> Reply:
    good, value = answer
    if not good:
        raise RuntimeError(value)
    return value


def _begun(result: Any, limit: int) -> Reply:
    """A first observation, perhaps with gymnasium's info behind it."""
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return Reply(_messages(result[0] if pair else result, limit))


def _answered(result: Any, limit: int) -> Reply:
    """(observation, reward, done), or gymnasium's five."""
    if not isinstance(result, tuple) or len(result) not in (3, 5):
        raise ValueError(
            "expected (observation, reward, done) from step, or gymnasium's five, got "
            f"{type(result).__name__}"
        )
    observation, reward, *ends = result
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite reward from step, got {number}")
    done = any(bool(end) for end in ends[:2])
    return Reply(() if done else _messages(observation, limit), number, done)


def _messages(observation: Any, limit: int) -> tuple[Message, ...]:
    """An observation as messages; a text is the user's."""
    if observation is None:
        raise ValueError("expected an observation, got None")
    if not isinstance(observation, list | tuple):
        observation = [{"role": "user", "content": str(observation)}]
    messages: list[Message] = []
    for message in observation:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role == "assistant":
            raise ValueError(
                f"expected messages to the policy, with a role, got {type(message).__name__} of "
                f"role {role!r}"
            )
        text = str(message.get("content"))
        left = len(text) - limit
        if left > 0:
            text = f"{text[:limit]}… ({left} characters more)"
        messages.append(dict(message) | {"content": text})
    if not messages:
        raise ValueError("expected an observation, got no message")
    return tuple(messages)
