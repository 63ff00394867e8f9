"""Python functions as tools: their schema, their calls, and what the model is told of the results.

Nothing that a model writes raises here: a call that is wrong, late, or fails gives an observation
that says so.
"""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .messages import Call, Turn


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; made by `tool`."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of its arguments
    check: Callable[[Mapping[str, Any]], dict[str, Any]]  # arguments as the function takes them
    function: Callable[..., Any]  # sync or async

    @property
    def schema(self) -> dict[str, Any]:
        """What chat templates list: a function with its parameters."""
        described = {"name": self.name, "description": self.description}
        return {"type": "function", "function": described | {"parameters": dict(self.parameters)}}

    @property
    def listing(self) -> dict[str, Any]:
        """What the Model Context Protocol lists."""
        described = {"name": self.name, "description": self.description}
        return described | {"inputSchema": dict(self.parameters)}


def tool(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> Tool:
    """A function with typed parameters as a tool; its docstring describes it.

    `Annotated[int, pydantic.Field(description=...)]` describes a parameter. Arguments are validated
    by pydantic, which needs the extra `agents`. Errors: a parameter without a type, or one that
    cannot be given by name.
    """
    create_model, config, field = _pydantic()
    name = function.__name__ if name is None else name
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    signature = inspect.signature(function, eval_str=True)
    for i, parameter in enumerate(signature.parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"expected parameters of {name} given by name, got {parameter}")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"expected typed parameters of {name}, got {parameter}; annotate it")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Numbered, so that no parameter's name is one of pydantic's own.
        fields[f"field_{i}"] = (parameter.annotation, field(default, alias=parameter.name))
        names[f"field_{i}"] = parameter.name
    model = create_model(name, __config__=config(extra="forbid"), **fields)

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {names[key]: value for key, value in model.model_validate(dict(arguments))}

    told = inspect.getdoc(function) if description is None else description
    schema = _without_titles(model.model_json_schema())
    schema.pop("description", None)
    return Tool(name, " ".join((told or "").split()), schema, check, function)


@dataclass(frozen=True)
class Toolbox:
    """The tools of an environment. `timeout` (seconds) is for one call, `limit` (characters) for
    what the model is told of one.

    The calls of a turn run beside one another. A Python thread cannot be killed: a call that is
    late is abandoned, and its thread ends with the function or with the process.
    """

    tools: tuple[Tool, ...]
    timeout: float | int = 30.0
    limit: int = 4000
    at_once: int = 8  # calls of one turn; others are refused

    def __post_init__(self) -> None:
        names = [t.name for t in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"expected tools of different names, got {names}")
        if not self.timeout > 0 or self.limit < 100 or self.at_once < 1:
            raise ValueError(
                "expected timeout > 0 s, limit ≥ 100 characters and at_once ≥ 1, got "
                f"{self.timeout}, {self.limit}, {self.at_once}"
            )

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools for a chat template."""
        return [t.schema for t in self.tools]

    def answer(self, turn: Turn) -> list[dict[str, Any]]:
        """A message of role "tool" for every call of a turn, in order, and for every fault."""
        refused = [f"error: {fault}" for fault in turn.faults]
        refused += ["error: too many calls at once"] * max(len(turn.calls) - self.at_once, 0)
        calls = turn.calls[: self.at_once]
        results = self.call(calls)
        messages = [
            {"role": "tool", "name": call.name, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return messages + [{"role": "tool", "content": text} for text in refused]

    def call(self, calls: Sequence[Call]) -> list[str]:
        """The results of calls that run beside one another, as texts; errors as texts too."""
        results = [self._late for _ in calls]

        def work(i: int) -> None:
            results[i] = self._shortened(self._result(calls[i]))

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self.timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return list(results)  # a copy: an abandoned thread may still write to the other

    @property
    def _late(self) -> str:
        return f"error: no result within {self.timeout} s"

    def _result(self, call: Call) -> str:
        found = next((t for t in self.tools if t.name == call.name), None)
        if found is None:
            return f"error: no tool {call.name!r}, only {[t.name for t in self.tools]}"
        try:
            arguments = found.check(call.arguments)
        except Exception as error:  # a type's own validation may raise anything
            return f"error: {_reasons(error)}"
        try:
            value = found.function(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value, self.timeout))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except _Late:
            return self._late
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"

    def _shortened(self, text: str) -> str:
        left = len(text) - self.limit
        return text if left <= 0 else f"{text[: self.limit]}… ({left} characters more)"


class _Late(Exception):
    """Out of time, which a tool's own TimeoutError does not mean."""


async def _awaited(value: Any, timeout: float | int) -> Any:
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await value
    except TimeoutError:
        if limit.expired():
            raise _Late from None
        raise


def _pydantic() -> tuple[Any, Any, Any]:
    """pydantic's create_model, ConfigDict and Field."""
    try:
        from pydantic import ConfigDict, Field, create_model
    except ImportError as error:
        raise ImportError(
            "tools need pydantic to check arguments: pip install 'purepost[agents]'"
        ) from error
    return create_model, ConfigDict, Field


def _reasons(error: Exception) -> str:
    """What pydantic found wrong, in a line."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()
    )


def _without_titles(schema: Any) -> Any:
    """A schema without the titles that pydantic makes of names."""
    if isinstance(schema, dict):
        return {
            key: (
                {name: _without_titles(x) for name, x in value.items()}
                if key in ("properties", "$defs")
                else _without_titles(value)
            )
            for key, value in schema.items()
            if key != "title"
        }
    return [_without_titles(x) for x in schema] if isinstance(schema, list) else schema
