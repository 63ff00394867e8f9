"""What a record's columns mean: seven schemas, recognised by their names and checked row by row.

A schema's texts are strings or, but for `text`, lists of messages. Columns that no schema names are
kept by the records; reward functions get them.

    text                        a document
    messages                    a dialogue
    prompt                      to be completed
    prompt, completion          a demonstration
    [prompt,] chosen, rejected  a preference, perhaps with its margin
    prompt, completion, label   a judgement: true for a good completion
    prompt, completions, labels steps of a solution, each right or wrong
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .columns import (
    Content,
    Message,
    Record,
    Tools,
    alike,
    check_answer,
    content,
    messages,
    prompt,
    string,
    tools,
    truth,
)
from .records import Records


@dataclass(frozen=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True)
class Chat:
    """A dialogue."""

    messages: list[Message]
    tools: Tools


@dataclass(frozen=True)
class Prompt:
    """What is to be completed."""

    prompt: Content
    tools: Tools


@dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it."""

    prompt: Content
    completion: Content
    tools: Tools


@dataclass(frozen=True)
class Preference:
    """Of two completions of a prompt, the better one and the worse."""

    prompt: Content
    chosen: Content
    rejected: Content
    margin: float  # by how much the chosen one is better; 0 if the record does not say
    tools: Tools


@dataclass(frozen=True)
class Judgement:
    """A completion, and whether it is good."""

    prompt: Content
    completion: Content
    label: bool
    tools: Tools


@dataclass(frozen=True)
class Solution:
    """Steps that follow a prompt, and which of them are right."""

    prompt: Content
    completions: list[str]
    labels: list[bool]
    tools: Tools


Example = Text | Chat | Prompt | Completion | Preference | Judgement | Solution


def schema_of(columns: frozenset[str]) -> type[Example]:
    """The schema that columns follow.

    Raises: ValueError when they follow none, or two of which neither takes in the other.
    """
    found = _fitting(columns)
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"expected columns of one meaning, got {sorted(columns)}, which may mean "
            f"{_names(*found)}; leave the others out: records.map(lambda row: {{...}})"
        )
    raise ValueError(
        f"expected columns {_names(*_SCHEMAS)}, got {sorted(columns)}; rename them: "
        "records.map(lambda row: {...})"
    )


def parse(records: Records, *kinds: type[Example]) -> Iterator[tuple[int, Any]]:
    """(index, example) of every record, which are all of one of these kinds.

    Raises: ValueError naming the row, for what is malformed or of another kind than the first.
    """
    first: type[Example] | None = None
    for i, record in enumerate(records):
        try:
            kind = schema_of(frozenset(record))
            first = first or kind
            if kind not in kinds:
                raise ValueError(f"expected columns {_names(*kinds)}, got {sorted(record)}")
            if kind is not first:
                raise ValueError(
                    f"expected columns {_names(first)} as in the first row, got {sorted(record)}; "
                    "read them apart"
                )
            yield i, _SCHEMAS[kind].parse(record)
        except ValueError as error:
            raise ValueError(f"{records.where(i)}: {error}") from error


def parse_prompt(record: Record) -> Prompt:
    """The prompt of a record, whatever else it holds."""
    return Prompt(prompt(record), tools(record))


@dataclass(frozen=True)
class _Schema:
    required: frozenset[str]
    columns: frozenset[str]  # and those that it can do without
    parse: Callable[[Record], Example]


def _names(*kinds: type[Example]) -> str:
    """ "text | messages | prompt, completion": what the kinds must have."""
    return " | ".join(", ".join(sorted(_SCHEMAS[kind].required)) for kind in kinds)


@lru_cache(maxsize=256)
def _fitting(columns: frozenset[str]) -> tuple[type[Example], ...]:
    """The schemas whose columns are there, less those whose columns are a part of another's."""
    found = {kind: s for kind, s in _SCHEMAS.items() if s.required <= columns}
    return tuple(
        kind
        for kind, s in found.items()
        if not any(s.required < other.columns for other in found.values() if other is not s)
    )


def _text(record: Record) -> Text:
    return Text(string(record["text"], "text"))


def _chat(record: Record) -> Chat:
    return Chat(messages(record["messages"], "messages"), tools(record))


def _completion(record: Record) -> Completion:
    before, after = alike(record, "completion")
    return Completion(before, after, tools(record))


def _preference(record: Record) -> Preference:
    if record.get("prompt") is None:
        before, chosen, rejected = _implicit_prompt(record)
    else:
        before, chosen, rejected = alike(record, "chosen", "rejected")
    return Preference(before, chosen, rejected, _margin(record.get("margin", 0.0)), tools(record))


def _judgement(record: Record) -> Judgement:
    before, after = alike(record, "completion")
    return Judgement(before, after, truth(record["label"], "label"), tools(record))


def _solution(record: Record) -> Solution:
    steps, labels = record["completions"], record["labels"]
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"expected {name} to be a list with entries, got {value!r:.60}")
    if len(steps) != len(labels):
        raise ValueError(f"expected a label for each of {len(steps)} steps, got {len(labels)}")
    return Solution(
        prompt(record),
        [_step(step, f"completions[{i}]") for i, step in enumerate(steps)],
        [truth(label, f"labels[{i}]") for i, label in enumerate(labels)],
        tools(record),
    )


def _step(value: Any, name: str) -> str:
    """A step as text, or as a list of one message of the assistant's."""
    step = content(value, name)
    if isinstance(step, str):
        return step
    roles = [message["role"] for message in step]
    if roles != ["assistant"]:
        raise ValueError(f"expected {name} to be one message of the assistant's, got {roles}")
    return string(step[0].get("content"), name)


def _margin(value: Any) -> float:
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise ValueError(f"expected margin to be a finite number, got {value!r:.60}")


def _implicit_prompt(record: Record) -> tuple[Content, Content, Content]:
    """The messages that chosen and rejected begin with alike are their prompt.

    It ends before an assistant's turn, so that the completions are what the assistant says.
    """
    chosen, rejected = (content(record[name], name) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError(
            "expected a prompt beside chosen and rejected as text, got none; only lists of "
            "messages can hold their prompt themselves"
        )
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared in (len(chosen), len(rejected)):
        raise ValueError("expected chosen and rejected to differ, got one that begins the other")
    while shared and chosen[shared - 1]["role"] == "assistant":
        shared -= 1
    if not shared:
        raise ValueError(
            "expected chosen and rejected to begin with the same messages, got different ones; "
            "add a column prompt"
        )
    check_answer(chosen[shared:], "chosen")
    check_answer(rejected[shared:], "rejected")
    return chosen[:shared], chosen[shared:], rejected[shared:]


_SCHEMAS: dict[type[Example], _Schema] = {
    kind: _Schema(frozenset(required.split()), frozenset(f"{required} {more}".split()), parser)
    for kind, required, more, parser in (
        (Text, "text", "", _text),
        (Chat, "messages", "", _chat),
        (Prompt, "prompt", "", parse_prompt),
        (Completion, "prompt completion", "", _completion),
        (Preference, "chosen rejected", "prompt", _preference),
        (Judgement, "prompt completion label", "", _judgement),
        (Solution, "prompt completions labels", "", _solution),
    )
}
