"""Questions that may be answered with the help of tools."""

from collections.abc import Callable
from typing import Any

from ..tools.functions import Toolbox
from ..tools.messages import Parse


class ToolUse:
    """Calls are made until a turn calls nothing: that turn is the answer, and ends the episode.

    The task holds "messages", or a "prompt"; `score(task, answer)` is the reward. What is called
    wrongly is answered with an error.
    """

    def __init__(
        self, toolbox: Toolbox, parse: Parse, score: Callable[[dict[str, Any], str], float]
    ) -> None:
        self.toolbox = toolbox
        self.parse = parse
        self.score = score
        self.task: dict[str, Any] = {}

    def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """The question."""
        self.task = task
        question = [{"role": "user", "content": task.get("prompt")}]
        return task.get("messages") or question

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool]:
        """The results of the calls, or the end."""
        turn = self.parse(action)
        if turn.calls or turn.faults:
            return self.toolbox.answer(turn), 0.0, False
        return [], self.score(self.task, turn.content), True
