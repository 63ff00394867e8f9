"""Environments that do what their task says, for tests: processes import them by name."""

import asyncio
import os
import time
from typing import Any

LONG = 1000.0


class Scripted:
    """`script` holds an entry for reset and one for each step: a number is the reward of a turn
    that is answered, "done" ends with reward 1, others are misbehaviour.
    """

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.turn = 0

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        """Begin the script."""
        self.script = list(task["script"])
        return self.act(task.get("prompt", "w10"))[0]

    def step(self, action: str) -> Any:
        """Go on with it."""
        self.turn += 1
        return self.act(f"w{11 + self.turn % 5}")

    def act(self, shown: str) -> Any:
        """The next entry."""
        match self.script.pop(0):
            case "done":
                return shown, 1.0, True
            case "raise":
                raise ZeroDivisionError("as asked")
            case "exit":
                raise SystemExit
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(LONG)
            case "none":
                return None, 0.0, False
            case "nothing":
                return None
            case "garbage":
                return {"what": self}
            case "nan":
                return shown, float("nan"), False
            case "words":
                return shown, "much", False
            case "assistant":
                return [{"role": "assistant", "content": "w10"}], 0.0, False
            case "megabyte":
                return "w12 " * 2**18, 0.0, False
            case ("slow", seconds):
                time.sleep(seconds)
                return shown, 0.0, False
            case reward:
                return shown, reward, False


class Asynchronous(Scripted):
    """The same, async, on an event loop that stays the same."""

    async def reset(self, task: dict[str, Any], seed: int) -> Any:
        """Begin the script."""
        self.loop = asyncio.get_running_loop()
        return Scripted.reset(self, task, seed)

    async def step(self, action: str) -> Any:
        """Go on with it."""
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        return Scripted.step(self, action)


class Gym:
    """gymnasium's shapes of results."""

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        """(observation, info)."""
        return seed, {}

    def step(self, action: str) -> Any:
        """The five."""
        return [1, 2], 0.5, False, True, {"why": "time"}
