"""Columns tell the schema; each row is checked, and the one that is wrong is named."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.data import read
from purepost.data.batches import encode_all
from purepost.data.schema import (
    Chat,
    Completion,
    Example,
    Judgement,
    Preference,
    Prompt,
    Solution,
    Text,
    parse,
    parse_prompt,
    schema_of,
)
from tests.data.shared import JSON

KINDS = (Text, Chat, Prompt, Completion, Preference, Judgement, Solution)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def first(record: dict[str, Any]) -> Example:
    return next(parse(read([record]), *KINDS))[1]


ASK, YES, NO = [user("a?")], [assistant("yes")], [assistant("no")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("record", "example"),
    [
        ({"text": "a"}, Text("a")),
        ({"messages": ASK + YES}, Chat(ASK + YES, None)),
        ({"messages": ASK + YES, "tools": TOOLS}, Chat(ASK + YES, TOOLS)),
        ({"messages": ASK + YES, "tools": json.dumps(TOOLS)}, Chat(ASK + YES, TOOLS)),
        ({"prompt": "a?", "answer": 3}, Prompt("a?", None)),
        ({"prompt": ASK}, Prompt(ASK, None)),
        ({"prompt": "a?", "completion": ""}, Completion("a?", "", None)),
        ({"prompt": ASK, "completion": YES}, Completion(ASK, YES, None)),
        (
            {"prompt": "a?", "chosen": "yes", "rejected": "no", "margin": 2},
            Preference("a?", "yes", "no", 2.0, None),
        ),
        ({"prompt": ASK, "chosen": YES, "rejected": NO}, Preference(ASK, YES, NO, 0.0, None)),
        ({"chosen": ASK + YES, "rejected": ASK + NO}, Preference(ASK, YES, NO, 0.0, None)),
        (
            {"prompt": "a?", "completion": "yes", "label": True},
            Judgement("a?", "yes", True, None),
        ),
        (
            {"prompt": "a?", "completions": ["so", "yes"], "labels": [True, False]},
            Solution("a?", ["so", "yes"], [True, False], None),
        ),
        (
            {"prompt": ASK, "completions": [YES, "no"], "labels": [True, False]},
            Solution(ASK, ["yes", "no"], [True, False], None),
        ),
    ],
)
def test_the_schema_is_told_by_the_columns(record: dict[str, Any], example: Example) -> None:
    assert first(record) == example


def test_an_implicit_prompt_ends_before_an_assistants_turn() -> None:
    chosen, rejected = ASK + YES + [user("b?")] + YES, ASK + YES + [user("c?")] + NO
    example = first({"chosen": chosen, "rejected": rejected})
    assert isinstance(example, Preference)
    assert (example.prompt, example.chosen, example.rejected) == (ASK, chosen[1:], rejected[1:])


@pytest.mark.parametrize(
    "columns",
    [
        "text messages",
        "text prompt",
        "messages prompt completion",
        "completion prompt chosen rejected",
    ]
    + ["prompt completion completions labels"],
)
def test_columns_of_two_meanings_are_named(columns: str) -> None:
    with pytest.raises(ValueError, match="columns of one meaning, got") as error:
        schema_of(frozenset(columns.split()))
    assert str(sorted(columns.split())) in str(error.value)


@pytest.mark.parametrize("columns", ["question answer", "completion", "chosen prompts", ""])
def test_columns_of_no_meaning_are_named(columns: str) -> None:
    with pytest.raises(ValueError, match=r"expected columns text \| messages \| prompt \|"):
        schema_of(frozenset(columns.split()))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": 3}, "text to be text, got 3"),
        ({"messages": []}, r"messages to be a list of messages, got \[\]"),
        ({"messages": "hello"}, "messages to be a list of messages"),
        ({"messages": ["hello"]}, r"messages\[0\] to be .'role'"),
        ({"messages": [*ASK, {"content": "x"}]}, r"messages\[1\] to have a role, got None"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\]'s content to be text"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content to be text, got None"),
        ({"messages": [assistant("") | {"tool_calls": "f()"}]}, "tool_calls to be a list"),
        ({"messages": ASK + YES, "tools": "{"}, "tools to be JSON"),
        ({"messages": ASK + YES, "tools": [3]}, "tools to be a list of JSON schemas"),
        ({"prompt": 3}, "prompt to be text or a list of messages, got 3"),
        ({"prompt": ""}, "a prompt that is not empty"),
        ({"prompt": ASK + YES}, "ends before the assistant's turn"),
        ({"prompt": "a?", "completion": YES}, "prompt, completion to be all text or all messages"),
        ({"prompt": ASK, "completion": ASK}, "completion to hold a message of the assistant's"),
        ({"prompt": ASK, "completion": None}, "completion to be text or a list of messages"),
        ({"chosen": "yes", "rejected": "no"}, "a prompt beside chosen and rejected as text"),
        ({"chosen": YES, "rejected": NO}, "begin with the same messages"),
        ({"chosen": ASK + YES, "rejected": ASK + YES}, "chosen and rejected to differ"),
        ({"chosen": ASK, "rejected": ASK + YES}, "chosen and rejected to differ"),
        ({"chosen": ASK + ASK, "rejected": ASK + YES}, "chosen to hold a message of the assist"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "margin to be a finite"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400}, "margin to be a fin"),
        ({"prompt": "a", "completion": "b", "label": 1}, "label to be true or false, got 1"),
        ({"prompt": "a", "completions": ["b"], "labels": []}, "labels to be a list with entries"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, "label for each of 2 steps"),
        ({"prompt": "a", "completions": ["b"], "labels": [1]}, r"labels\[0\] to be true or false"),
        ({"prompt": "a", "completions": [3], "labels": [True]}, r"completions\[0\] to be text or"),
        (
            {"prompt": "a", "completions": [ASK], "labels": [True]},
            "message of the assistant's, got",
        ),
    ],
)
def test_the_row_that_is_wrong_is_named(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"row 0: expected .*{words}"):
        first(record)


def test_rows_are_of_one_schema_and_one_that_is_asked_for() -> None:
    mixed = read([{"text": "a"}, {"text": "b"}, {"messages": ASK + YES}])
    with pytest.raises(ValueError, match="row 2: expected columns text as in the first row"):
        list(parse(mixed, Text, Chat))
    with pytest.raises(ValueError, match=r"row 0: expected columns prompt, got \['text'\]"):
        list(parse(mixed, Prompt))


COLUMNS = "text messages prompt completion chosen rejected label completions labels tools margin"
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": st.text() | JSON},
    optional={"tool_calls": JSON},
)
VALUE = st.text() | st.booleans() | st.lists(MESSAGE | st.text() | st.booleans()) | JSON


@given(record=st.dictionaries(st.sampled_from(COLUMNS.split()), VALUE))
def test_any_values_are_an_example_or_a_value_error(record: dict[str, Any]) -> None:
    records = read([record])
    try:
        assert isinstance(next(parse(records, *KINDS))[1], KINDS)
    except ValueError as error:
        assert str(error).startswith("row 0: ")
    try:
        assert isinstance(parse_prompt(record), Prompt)
    except ValueError:
        pass
    with pytest.raises(ValueError, match="expected examples with something to train|row 0: "):
        encode_all(records, lambda example: None, *KINDS)
