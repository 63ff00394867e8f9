"""Environments of `verifiers`, made of its own classes and played by a script, offline.

It brings some dozens of packages: `pip install '.[verifiers]'` has these tests run.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from purepost.environments.host import Failure, Pool
from purepost.environments.verifiers import Verifiers, tool_schemas, verifiers_tasks
from purepost.environments.workers import Reply
from purepost.rollout.environment import ERROR
from purepost.tools import hermes

vf = pytest.importorskip("verifiers")
datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in (2, 3, 21)]


async def right(completion: Any, answer: str) -> float:
    """Whether the last message is the answer."""
    return float(completion[-1]["content"] == answer)


async def brief(completion: Any) -> float:
    """Fewer messages are better."""
    return 1 / len(completion)


def rows() -> Any:
    return datasets.Dataset.from_list(ROWS)


def single() -> Any:
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=rows(), rubric=rubric, system_prompt="Sums.")


class Hints(vf.MultiTurnEnv):
    """Another try after a wrong answer, three in all; "break" breaks it."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """The hint."""
        if messages[-1].content == "break":
            raise vf.ToolCallError("broken")
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return []
        return [{"role": "user", "content": f"Not {messages[-1].content}."}]


async def found(completion: Any, answer: str) -> float:
    """Whether the answer was found at all."""
    said = [m["content"] for m in completion if m["role"] == "assistant"]
    return float(answer in said)


def hints() -> Any:
    return Hints(dataset=rows(), rubric=vf.Rubric(funcs=[found, brief]), max_turns=3)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def tools() -> Any:
    return vf.ToolEnv(dataset=rows(), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)


def play(pool: Pool, task: Any, said: Sequence[str]) -> list[Any]:
    """The replies to reset and to what is said, up to the end."""
    seat = pool.seat()
    replies: list[Any] = [seat.call("reset", task, 0).result()]
    for text in said:
        if isinstance(replies[-1], Failure) or replies[-1].done:
            break
        replies.append(seat.call("step", text).result())
    seat.close()
    return replies


def user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def test_a_single_turn() -> None:
    environment = single()
    tasks = verifiers_tasks(environment)
    assert [row["answer"] for row in tasks] == ["4", "6", "42"]
    pool = Pool(lambda: Verifiers(environment))
    first, last = play(pool, tasks[1], ["6"])
    assert first.messages == ({"role": "system", "content": "Sums."}, *user("What is 3 + 3?"))
    assert last == Reply((), 1.5, True)
    assert play(pool, tasks[1], ["7"])[-1] == Reply((), 0.5, True)
    pool.close()


def test_several_turns() -> None:
    environment = hints()
    task = verifiers_tasks(environment)[0]
    pool = Pool(lambda: Verifiers(environment))
    found_late = play(pool, task, ["3", "5", "4"])
    assert found_late == [
        Reply(user("What is 2 + 2?")),
        Reply(user("Not 3.")),
        Reply(user("Not 5.")),
        Reply((), 1 + 1 / 5, True),
    ]
    found_soon = play(pool, task, ["3", "4"])
    assert found_soon[-1] == Reply((), 1 + 1 / 4, True)  # "Yes." is the fourth message
    assert play(pool, task, ["1", "2", "3"])[-1] == Reply((), 1 / 5, True)
    broken = play(pool, task, ["break", "4"])[-1]
    assert isinstance(broken, Failure) and broken.finish == ERROR
    assert "the environment stopped" in broken.why and "ToolCallError" in broken.why
    pool.close()


def test_tools() -> None:
    environment = tools()
    (schema,) = tool_schemas(environment)
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    call = '<tool_call>{"name": "add", "arguments": {"a": 21, "b": 21}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {"a": 21}}</tool_call>'
    pool = Pool(lambda: Verifiers(environment, parse=hermes))
    task = verifiers_tasks(environment)[2]
    _, error, twice, last = play(pool, task, [wrong, call + call, "<think>So.</think>42"])
    assert error.messages[0]["role"] == "tool" and "'b'" in error.messages[0]["content"]
    assert twice.messages == ({"role": "tool", "content": "42", "name": "add"},) * 2
    assert last == Reply((), 1.0, True)
    assert play(pool, task, [call] * 5)[-1] == Reply((), 0.0, True)  # its fourth turn is the last
    pool.close()


def test_episodes_run_beside_one_another() -> None:
    environment = hints()
    tasks = verifiers_tasks(environment)
    pool = Pool(lambda: Verifiers(environment), workers=6)
    seats = [pool.seat() for _ in range(12)]
    opening = [seat.call("reset", tasks[i % 3], 0) for i, seat in enumerate(seats)]
    opened: list[Any] = [call.result() for call in opening]
    assert [r.messages[0]["content"] for r in opened] == [row["question"] for row in ROWS] * 4
    answering = [seat.call("step", str(i)) for i, seat in enumerate(seats)]
    answered: list[Any] = [call.result() for call in answering]
    assert [r.messages for r in answered[:2]] == [user("Not 0."), user("Not 1.")]
    for i, seat in enumerate(seats[:3]):
        assert seat.call("step", ROWS[i]["answer"]).result() == Reply((), 1 + 1 / 4, True)
    for seat in seats:  # most of them in mid-episode
        seat.close()
    pool.close()
