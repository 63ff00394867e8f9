"""The values that columns may hold: texts, messages, tools, truth values. Anything else raises
ValueError.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

Record = dict[str, Any]
Message = dict[str, Any]
Content = str | list[Message]
Tools = list[dict[str, Any]] | None


def string(value: Any, name: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"expected {name} to be text, got {value!r:.60}")
    return value


def truth(value: Any, name: str) -> bool:
    """True or false: a number may mean too much else."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"expected {name} to be true or false, got {value!r:.60}")
    return bool(value)


def messages(value: Any, name: str) -> list[Message]:
    """A dialogue: every message has a role, and text unless it calls tools."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected {name} to be a list of messages, got {value!r:.60}")
    for i, message in enumerate(value):
        _check_message(message, f"{name}[{i}]")
    return [dict(message) for message in value]


def content(value: Any, name: str) -> Content:
    """A text, or messages."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected {name} to be text or a list of messages, got {value!r:.60}")
    return messages(value, name)


def prompt(record: Record) -> Content:
    """What comes before the assistant's turn."""
    value = content(record.get("prompt"), "prompt")
    if not value:
        raise ValueError(
            "expected a prompt that is not empty, got ''; there is nothing to complete"
        )
    if not isinstance(value, str) and value[-1]["role"] == "assistant":
        raise ValueError(
            "expected a prompt that ends before the assistant's turn, got one that ends with it; "
            "move that message to the completion"
        )
    return value


def alike(record: Record, *columns: str) -> tuple[Content, ...]:
    """The prompt and these columns, which are all text or all messages."""
    values = [prompt(record), *(content(record[name], name) for name in columns)]
    if len({isinstance(value, str) for value in values}) > 1:
        names = ", ".join(("prompt", *columns))
        raise ValueError(
            f"expected {names} to be all text or all messages, got some of each; where the "
            "messages repeat the prompt, leave that column out"
        )
    for name, value in zip(columns, values[1:], strict=True):
        check_answer(value, name)
    return tuple(values)


def check_answer(value: Content, name: str) -> None:
    """Messages that answer a prompt have one of the assistant's among them."""
    if not isinstance(value, str) and all(m["role"] != "assistant" for m in value):
        roles = [message["role"] for message in value]
        raise ValueError(f"expected {name} to hold a message of the assistant's, got {roles}")


def tools(record: Record) -> Tools:
    """The functions that a dialogue's assistant may call: objects, or JSON of them."""
    value = record.get("tools")
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected tools to be JSON, got {value!r:.60}") from error
    if not value:
        return None
    if not _all_mappings(value):
        raise ValueError(f"expected tools to be a list of JSON schemas, got {value!r:.60}")
    return [dict(tool) for tool in value]


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"expected {name} to be {{'role': ..., 'content': ...}}, got {message!r:.60}"
        )
    role, text, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or not role:
        raise ValueError(f"expected {name} to have a role, got {role!r:.60}")
    if calls is not None and not _all_mappings(calls):
        raise ValueError(f"expected {name}'s tool_calls to be a list of objects, got {calls!r:.60}")
    if not _is_text(text) and not (text is None and calls):
        raise ValueError(f"expected {name}'s content to be text, got {text!r:.60}")


def _is_text(value: Any) -> bool:
    """A text, or parts with texts in them."""
    if isinstance(value, str):
        return True
    return _all_mappings(value) and all(isinstance(part.get("text"), str) for part in value)


def _all_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)
