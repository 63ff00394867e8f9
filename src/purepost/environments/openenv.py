"""Environments of OpenEnv, which live on a server; an episode has a session of its own there."""

import json
from collections.abc import Callable, Mapping
from typing import Any


def as_text(observation: Any) -> str:
    """An observation as JSON, without what is told apart: the reward, done, metadata."""
    fields = observation if isinstance(observation, Mapping) else observation.model_dump()
    shown = {k: v for k, v in fields.items() if k not in ("reward", "done", "metadata")}
    return json.dumps(shown, ensure_ascii=False, default=str)


class OpenEnv:
    """An episode with a server.

    `connect` makes a client of it: any `EnvClient`, such as
    `lambda: openenv.core.GenericEnvClient("http://localhost:8000")`. `act` makes the policy's text
    the client's action, and may raise: the episode then ends as an error. `show` makes an
    observation a text, or messages. A task's columns are arguments of the environment's reset.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        act: Callable[[str], Any],
        show: Callable[[Any], Any] = as_text,
    ) -> None:
        self.connect = connect
        self.act = act
        self.show = show
        self.client: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        """The first observation."""
        # Its thread answers the server's pings while the policy takes its turn.
        self.client = self.connect().sync()
        given = {name: value for name, value in task.items() if value is not None}
        return self.show(self.client.reset(seed=seed, **given).observation)

    def step(self, action: str) -> tuple[Any, float, bool]:
        """The observation, reward and end that the server answers with; no reward is 0."""
        result = self.client.step(self.act(action))
        return self.show(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        """End the session."""
        if self.client is not None:
            self.client.close()
