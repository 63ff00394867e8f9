"""Python functions as tools: schemas, calls, and errors as what the model is told."""

import asyncio
import threading
import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from purepost.environments.tool_use import ToolUse
from purepost.tools import Call, Toolbox, Turn, compute, hermes, tool


def add(a: int, b: Annotated[int, Field(description="the second")] = 1) -> int:
    """Add two
    numbers.
    """
    return a + b


def search(query: str, *, where: Literal["here", "there"] = "here", json: bool = False) -> Any:
    """Search."""
    return {"query": query, "where": where, "json": json}


def broken(x: float) -> str:
    """Break."""
    raise RuntimeError(f"no {x}")


async def slowly(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


BOX = Toolbox(tuple(map(tool, (add, search, broken, slowly))), timeout=2.0, limit=100)


def test_a_signature_is_a_schema() -> None:
    assert tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer", "default": 1, "description": "the second"},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    listing = tool(search, name="find", description="Find.").listing
    assert listing["name"] == "find" and listing["description"] == "Find."
    assert listing["inputSchema"]["properties"]["where"]["enum"] == ["here", "there"]
    assert listing["inputSchema"]["properties"]["json"] == {"default": False, "type": "boolean"}
    assert [s["function"]["name"] for s in BOX.schemas] == ["add", "search", "broken", "slowly"]


def test_functions_that_cannot_be_tools() -> None:
    def untyped(a) -> int:  # noqa: ANN001
        return a

    def positional(a: int, /) -> int:
        return a

    def many(*a: int) -> int:
        return len(a)

    with pytest.raises(ValueError, match="expected typed parameters of untyped, got a"):
        tool(untyped)
    for function in (positional, many):
        with pytest.raises(ValueError, match="given by name"):
            tool(function)
    with pytest.raises(ValueError, match="different names"):
        Toolbox((tool(add), tool(add)))
    with pytest.raises(ValueError, match="expected timeout > 0"):
        Toolbox((tool(add),), timeout=0)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (Call("add", {"a": 2, "b": 3}), "5"),
        (Call("add", {"a": "2"}), "3"),  # what can be read as an integer
        (Call("add", {"a": 1.5}), "error: a: Input should be a valid integer"),
        (Call("add", {}), "error: a: Field required"),
        (Call("add", {"a": 1, "c": 1}), "error: c: Extra inputs are not permitted"),
        (Call("search", {"query": "ü"}), '{"query": "ü", "where": "here", "json": false}'),
        (Call("search", {"query": "x", "where": "up"}), "error: where: Input should be 'here' or"),
        (Call("broken", {"x": 1}), "error: RuntimeError: no 1.0"),
        (Call("slowly", {"seconds": 0}), "done"),
        (Call("nothing", {}), "error: no tool 'nothing', only ['add', "),
        (Call("search", {"query": "x" * 200}), "… (1"),
    ],
)
def test_calls_give_texts(call: Call, result: str) -> None:
    (text,) = BOX.call([call])
    assert result in text and len(text) < 130


def test_calls_run_beside_one_another_and_late_ones_are_left() -> None:
    hold = threading.Event()

    def hang(i: int) -> str:
        """Hang."""
        hold.wait(30)
        return "late"

    box = Toolbox((tool(hang), tool(slowly), tool(add)), timeout=0.6)
    calls = [Call("hang", {"i": 1}), Call("slowly", {"seconds": 0.2}), Call("add", {"a": 1})]
    start = time.monotonic()
    results = box.call([*calls, Call("slowly", {"seconds": 0.2}), Call("slowly", {"seconds": 9})])
    assert 0.5 < time.monotonic() - start < 3
    assert results[1:4] == ["done", "2", "done"]
    assert results[0] == results[4] == "error: no result within 0.6 s"
    hold.set()


@pytest.mark.parametrize(
    ("timeout", "result"),
    [(0.05, "error: no result within 0.05 s"), (5.0, "error: TimeoutError: its own")],
)
def test_an_awaited_tool_that_is_late_is_told_from_one_that_raises(
    timeout: float, result: str
) -> None:
    async def impatient() -> str:
        """Wait a little, then raise."""
        await asyncio.sleep(0.2)
        raise TimeoutError("its own")

    box = Toolbox((tool(impatient),), timeout=timeout)
    assert box._result(Call("impatient", {})) == result


def test_a_turn_is_answered_call_by_call() -> None:
    turn = hermes(
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        "<tool_call>nonsense</tool_call>"
        '<tool_call>{"name": "add", "arguments": {"a": 5}}</tool_call>'
    )
    first, second, third = BOX.answer(turn)
    assert first == {"role": "tool", "name": "add", "content": "2"}
    assert second["content"] == "6"
    assert third["role"] == "tool" and third["content"].startswith("error: a call is not JSON")
    one = Toolbox((tool(add),), at_once=1)
    told = one.answer(Turn("", (Call("add", {"a": 1}),) * 3))
    assert [m["content"] for m in told] == ["2", *["error: too many calls at once"] * 2]


def test_a_question_may_be_answered_with_tools() -> None:
    def calculate(expression: str) -> str:
        """Compute."""
        return str(compute(expression))

    def score(task: dict[str, Any], answer: str) -> float:
        return float(answer == task["answer"])

    game = ToolUse(Toolbox((tool(calculate),)), hermes, score)
    assert game.reset({"prompt": "2·3?", "answer": "6"}, 0) == [{"role": "user", "content": "2·3?"}]
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "2*3"}}</tool_call>'
    told, reward, done = game.step(call)
    assert (told[0]["content"], reward, done) == ("6", 0.0, False)
    told, reward, done = game.step(call.replace("2*3", "2*"))
    assert told[0]["content"] == "error: ValueError: expected a number, got 'the end'"
    assert game.step("6") == ([], 1.0, True)
    messages = [{"role": "system", "content": "Be brief."}]
    assert game.reset({"messages": messages, "answer": ""}, 0) == messages
    assert game.step("7")[1:] == (0.0, True)
