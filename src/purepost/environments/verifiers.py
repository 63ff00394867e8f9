"""Environments of `verifiers`: their own loop runs the episode, and the policy is its client."""

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..data.records import Records, read
from ..tools.messages import Parse, Turn
from .workers import Message

# What an episode's loop asked: the whole dialogue, and where its answer is awaited.
Request = tuple[Sequence[Any], asyncio.Future[str]]


def verifiers_tasks(environment: Any, *, held_out: bool = False) -> Records:
    """The environment's own examples, of which an episode takes all columns."""
    return read(environment.get_eval_dataset() if held_out else environment.get_dataset())


def tool_schemas(environment: Any) -> list[dict[str, Any]]:
    """The environment's tools for a chat template."""
    return [
        {
            "type": "function",
            "function": t.model_dump(include={"name", "description", "parameters"}),
        }
        for t in environment.tool_defs or []
    ]


class Verifiers:
    """An episode of a `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` or any other of their kind.

    `parse` takes the policy's turns apart; environments with tools need one that finds the calls,
    such as `purepost.tools.hermes`. The reward is the rubric's, and comes at the end. Errors:
    whatever the environment stopped for; one that rewrites what was said before.
    """

    def __init__(self, environment: Any, *, parse: Parse = Turn) -> None:
        self.environment = environment
        self.parse = parse
        self.turns = 0
        self.called: dict[str, str] = {}  # id of a call → the tool
        self.dialogue: list[Any] = []  # up to the turn that is awaited
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.said: asyncio.Future[str] | None = None
        self.run: asyncio.Task[Mapping[str, Any]] | None = None

    async def reset(self, task: dict[str, Any], seed: int) -> list[Message]:
        """The environment's prompt; `task` is a row of `verifiers_tasks`."""
        example = {name: value for name, value in task.items() if value is not None}
        client = _client(self)
        rollout = self.environment.run_rollout(example, client, "policy", {})
        self.run = asyncio.create_task(rollout)
        messages, _, done = await self._next(self.run)
        if done:
            raise RuntimeError("the environment ended before the policy's first turn")
        return messages

    async def step(self, action: str) -> tuple[list[Message], float, bool]:
        """The environment's answer, or its reward at the end."""
        if self.run is None or self.said is None:
            raise RuntimeError("expected reset before step")
        self.said.set_result(action)
        return await self._next(self.run)

    async def close(self) -> None:
        """End the environment's loop, with its own cleaning up."""
        if self.run is not None:
            self.run.cancel()
            await asyncio.gather(self.run, return_exceptions=True)

    async def ask(self, dialogue: Sequence[Any]) -> str:
        """The policy's turn in a dialogue, when it has been taken."""
        said = asyncio.get_running_loop().create_future()
        self.requests.put_nowait((dialogue, said))
        return await said

    async def _next(self, run: asyncio.Task[Any]) -> tuple[list[Message], float, bool]:
        """Wait until the environment asks for a turn, or has ended."""
        request = asyncio.create_task(self.requests.get())
        await asyncio.wait((request, run), return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            output = run.result()
            if output.get("error") is not None:
                raise RuntimeError(f"the environment stopped: {output['error']}")
            return [], float(output["reward"]), True
        dialogue, self.said = request.result()
        known = len(self.dialogue)
        if list(dialogue[:known]) != self.dialogue:
            raise ValueError("expected a dialogue that goes on, got one that was rewritten")
        self.dialogue = list(dialogue)
        new = dialogue[known + (self.turns > 0) :]  # the policy's own turn is not told to it
        return [self._message(message) for message in new], 0.0, False

    def _message(self, given: Any) -> Message:
        """A message as chat templates read it: texts of parts joined, tools' results by name."""
        message = given.model_dump(exclude_none=True)
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = "\n".join(part.get("text", "") for part in content)
        if message["role"] == "tool":
            message["name"] = self.called.get(message.pop("tool_call_id"), "unknown")
        return message


def _client(episode: Verifiers) -> Any:
    """The policy as a client of `verifiers`."""
    try:
        clients = importlib.import_module("verifiers.clients")
        types = importlib.import_module("verifiers.types")
    except ImportError as error:
        raise ImportError(
            "these environments need verifiers: pip install 'purepost[verifiers]'"
        ) from error

    class Policy(clients.Client):
        """Nothing is sent anywhere."""

        def setup_client(self, config: Any) -> None:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> str:
            return await episode.ask(prompt)

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            turn = episode.parse(response)
            episode.turns += 1
            calls = [
                types.ToolCall(
                    id=f"{episode.turns}_{i}", name=c.name, arguments=json.dumps(c.arguments)
                )
                for i, c in enumerate(turn.calls)
            ]
            episode.called |= {call.id: call.name for call in calls}
            message = types.ResponseMessage(
                content=turn.content,
                reasoning_content=turn.reasoning,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return types.Response(id=str(episode.turns), created=0, model="policy", message=message)

        async def close(self) -> None:
            return None

    return Policy(None)
