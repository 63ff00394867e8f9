"""Reward functions in Python: f(prompts, completions, **columns) → a number or None per sample.

The signature is TRL's, so its users' functions run unchanged; sync and async alike. Several are
weighted and added up. None says that the function has nothing to say about a sample; a sample is
unscored when no function says anything. A function that raises, is late, or gives NaN or inf leaves
its samples unscored whatever the others say, for a part of a reward is another reward.
"""

import asyncio
import functools
import inspect
import math
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from .scores import Scores

RewardFn = Callable[..., Iterable[Any] | Awaitable[Iterable[Any]]]
Failure = tuple[str, str]  # kind, and what happened in words


def combine_rewards(
    functions: Sequence[RewardFn],
    weights: Sequence[float | int] | None = None,
    *,
    timeout: float | int | None = None,
    per_sample: bool = False,
    workers: int = 8,
) -> "HostReward":
    """Σ_f weight_f · f over the functions that answered.

    `timeout` (seconds) is for one call of a function: over all samples, or with `per_sample` over
    one, when a function is called with lists of length 1, `workers` of them at a time, and a
    failure costs one sample only. Weights are 1 by default. A Python thread cannot be killed: a
    function that is late is abandoned, its samples are unscored and counted, and its thread goes on
    until it ends or the process does. Async functions share one event loop and are cancelled.
    """
    if not functions:
        raise ValueError("expected at least one reward function, got none; give some")
    weights = [1.0] * len(functions) if weights is None else [float(w) for w in weights]
    if len(weights) != len(functions):
        raise ValueError(
            f"expected {len(functions)} weights, one per reward function, got {len(weights)}"
        )
    if not all(math.isfinite(w) for w in weights):
        raise ValueError(f"expected finite weights, got {weights}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"expected timeout > 0 seconds, got {timeout}; None waits for ever")
    if workers < 1:
        raise ValueError(f"expected workers ≥ 1, got {workers}")
    return HostReward(functions, weights, timeout, per_sample, workers)


class HostReward:
    """Weighted Python reward functions as one; made by `combine_rewards`."""

    def __init__(
        self,
        functions: Sequence[RewardFn],
        weights: Sequence[float],
        timeout: float | int | None,
        per_sample: bool,
        workers: int,
    ) -> None:
        self.functions = tuple(functions)
        self.names = _distinct([_name(f) for f in functions])
        self.weights = tuple(weights)
        self.timeout = timeout
        self.per_sample = per_sample
        self.workers = workers
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Scores:
        """Score n samples; prompts, completions and every column have n entries.

        Prompts are strings or lists of messages. A function gets the columns it names, all of them
        if it takes `**columns`. Raises: ValueError if lengths disagree, a function names a column
        that is not there, or it returns another number of rewards; TypeError if something in its
        list is neither a number nor None.
        """
        given = {"prompts": prompts, "completions": completions}
        if overlap := given.keys() & (columns or {}).keys():
            raise ValueError(f"expected columns with names of their own, got {sorted(overlap)}")
        given |= columns or {}
        n = len(prompts)
        for name, column in given.items():
            if len(column) != n:
                raise ValueError(
                    f"expected {n} entries in {name}, one per sample, got {len(column)}"
                )
        arguments = [
            _select(f, name, given) for f, name in zip(self.functions, self.names, strict=True)
        ]
        parts = np.full((n, len(self.functions)), np.nan, np.float32)
        failed = np.zeros((n, len(self.functions)), bool)
        failures: dict[str, int] = {}
        for j, (f, name) in enumerate(zip(self.functions, self.names, strict=True)):
            for i, outcome in enumerate(self._outcomes(f, name, arguments[j], n)):
                failed[i, j] = isinstance(outcome, tuple)
                if isinstance(outcome, float):
                    parts[i, j] = outcome
                elif isinstance(outcome, tuple):
                    kind = f"{name}/{outcome[0]}"
                    if kind not in failures:
                        warnings.warn(
                            f"reward function {name} {outcome[1]}; such samples stay unscored",
                            RuntimeWarning,
                            stacklevel=2,
                        )
                    failures[kind] = failures.get(kind, 0) + 1
        answered = np.isfinite(parts)
        total = np.where(answered, parts, 0.0).astype(np.float64) @ np.asarray(self.weights)
        scored = answered.any(1) & ~failed.any(1)
        rewards = np.where(scored, total, np.nan).astype(np.float32)
        return Scores(rewards, parts, self.names, failures)

    def _outcomes(
        self, f: RewardFn, name: str, arguments: dict[str, Sequence[Any]], n: int
    ) -> list[float | Failure | None]:
        """Per sample: a reward, None for an abstention, or what went wrong."""
        if self.per_sample:
            calls = [{k: [v[i]] for k, v in arguments.items()} for i in range(n)]
        else:
            calls = [{k: list(v) for k, v in arguments.items()}] if n else []
        each = n // max(len(calls), 1)
        outcomes: list[float | Failure | None] = []
        for result in self._run(f, calls):
            if isinstance(result, Exception):
                outcomes += [self._failure(result)] * each
            else:
                outcomes += _check(name, result, each)
        return outcomes

    def _run(self, f: RewardFn, calls: list[dict[str, Any]]) -> Iterator[Any]:
        """Each call's result, or the exception that it ended in."""
        if self.timeout is None and not self.per_sample:
            for arguments in calls:
                yield self._attempt(f, arguments)
            return
        for start in range(0, len(calls), self.workers):
            some = calls[start : start + self.workers]
            results: list[Any] = [_Late() for _ in some]

            def work(i: int, arguments: dict[str, Any], results: list[Any] = results) -> None:
                results[i] = self._attempt(f, arguments)

            threads = [
                threading.Thread(target=work, args=(i, arguments), daemon=True)
                for i, arguments in enumerate(some)
            ]
            for thread in threads:
                thread.start()
            deadline = None if self.timeout is None else time.monotonic() + self.timeout
            for thread in threads:
                thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if any(thread.is_alive() for thread in threads):
                self._drop_blocked_loop()
            yield from list(results)  # a copy: an abandoned thread may still write to the other

    def _attempt(self, f: RewardFn, arguments: dict[str, Any]) -> Any:
        try:
            result = f(**arguments)
            return self._wait(result) if inspect.isawaitable(result) else result
        except (Exception, CancelledError) as error:
            return error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _wait(self, result: Awaitable[Any]) -> Any:
        """Run an awaitable on the event loop that all async functions share."""

        async def limited() -> Any:
            limit = asyncio.timeout(self.timeout)
            try:
                async with limit:
                    return await result
            except TimeoutError:
                if limit.expired():
                    raise _Late from None
                raise

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(limited(), self._loop)
        return future.result()

    def _drop_blocked_loop(self) -> None:
        """Take a new event loop next time if a coroutine holds this one up without awaiting."""
        with self._lock:
            if self._loop is not None:
                answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
                try:
                    answer.result(1.0)
                except TimeoutError:
                    self._loop = None

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, _Late):
            scope = "a sample" if self.per_sample else "the call"
            return "timed_out", f"took more than {self.timeout} s for {scope}"
        return "raised", f"raised {type(error).__name__}: {error}"


class _Late(Exception):
    """Out of time, which a function's own TimeoutError does not mean."""


def _check(name: str, result: Any, n: int) -> list[float | Failure | None]:
    """The n entries of a function's result."""
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise TypeError(
            f"expected reward function {name} to return a list of {n} rewards, "
            f"got {type(result).__name__}"
        )
    entries = list(result)
    if len(entries) != n:
        raise ValueError(
            f"expected {n} rewards from reward function {name}, got {len(entries)}; "
            "return one per completion, None to abstain"
        )
    outcomes: list[float | Failure | None] = []
    for entry in entries:
        if isinstance(entry, str | bytes):
            raise TypeError(f"expected numbers or None from reward function {name}, got {entry!r}")
        try:
            value = None if entry is None else float(entry)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"expected numbers or None from reward function {name}, got {entry!r}"
            ) from error
        if value is None or math.isfinite(value):
            outcomes.append(value)
        else:
            outcomes.append(("not_finite", f"returned {value}"))
    return outcomes


def _select(f: RewardFn, name: str, given: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The arguments that a function takes; ValueError if it needs one that is not there."""
    parameters = inspect.signature(f).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    missing += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if missing:
        raise ValueError(
            f"reward function {name} expects {missing}, got {sorted(given)}; "
            "rename its parameters or add those columns to the data"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in named if p.name in given}


def _name(f: RewardFn) -> str:
    if isinstance(f, functools.partial):
        return _name(f.func)
    return f.__name__ if inspect.isroutine(f) else type(f).__name__


def _distinct(names: list[str]) -> tuple[str, ...]:
    """Names with a number where one is taken: f, f_2, f_3."""
    counts: dict[str, int] = {}
    distinct = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        distinct.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return tuple(distinct)
