"""What an assistant's turn says and calls, whatever format it is written in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments, JSON's types."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """An assistant's turn, taken apart."""

    content: str
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()  # what looked like a call and is none, in words for the model
    reasoning: str | None = None

    def message(self) -> dict[str, Any]:
        """The turn as chat templates read it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return message


# text of a turn, without its end token → what it says and calls
Parse = Callable[[str], Turn]
