"""Calls as each family writes them, against its chat template (tests/golden/chats.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.text import render
from purepost.tools import Call, Turn, gemma, hermes, llama3, mistral
from purepost.tools.formats import write_gemma, write_hermes, write_llama3, write_mistral

CHATS = json.loads(
    (Path(__file__).parents[1] / "golden" / "chats.json").read_text(encoding="utf-8")
)
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>")
FORMATS = {
    "qwen2.5": (hermes, write_hermes),
    "qwen3": (hermes, write_hermes),
    "qwen3-marked": (hermes, write_hermes),
    "llama3.1": (llama3, write_llama3),
    "mistral": (mistral, write_mistral),
}


def written(family: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = CHATS["templates"][family]
    # The prompts of Mistral list tools in the last question only, so that turns rewrite them.
    tools = None if family == "mistral" else CHATS["tools"]
    return render(template, messages, tools=tools, **{**CHATS["variables"], **options})


def said(family: str, messages: list[dict[str, Any]], i: int) -> str:
    """What message i adds to the prompt before it, less the token that ends the turn."""
    prompt = written(family, messages[:i], add_generation_prompt=True)
    turn = written(family, messages[: i + 1], add_generation_prompt=False)
    assert turn.startswith(prompt)
    text = turn[len(prompt) :].rstrip("\n")
    for end in ENDS:
        text = text.removesuffix(end)
    return text


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("dialogue", ["tools", "two calls"])
def test_parsers_read_what_templates_write(family: str, dialogue: str) -> None:
    parse, write = FORMATS[family]
    messages = CHATS["dialogues"][dialogue]
    if family == "mistral":  # its prompts end with a question or a result
        messages = [m for m in messages if m["role"] != "system"]
    calls = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            text = said(family, messages, i)
        except ValueError:
            assert family == "llama3.1" and dialogue == "two calls"  # one call at a time
            return
        turn = parse(text)
        expected = [
            Call(c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or []
        ]
        calls += len(expected)
        assert list(turn.calls) == expected and not turn.faults
        content = message["content"] or ""
        assert turn.content == ("" if expected and family == "mistral" else content)
        again = [*messages[:i], turn.message()]
        assert said(family, again, i) == text
        assert parse(write(turn)) == turn
    assert calls == (1 if dialogue == "tools" else 2)


names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("print", "and", "as", "if", "in", "is", "or", "not", "def", "del")
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
MARKS = ("<", "[TOOL", "```", "|", "{")
CALLS = st.lists(st.builds(Call, names, st.dictionaries(names, values, max_size=3)), max_size=3)


@given(CALLS.map(tuple), st.sampled_from(["", "So be it.", "Both,\nplease."]))
def test_what_is_written_is_read_again(calls: tuple[Call, ...], content: str) -> None:
    text = json.dumps([c.arguments for c in calls])
    if any(mark in text for mark in MARKS[:3]):
        return
    turn = Turn(content, calls)
    assert hermes(write_hermes(turn)) == turn
    assert mistral(write_mistral(turn)) == turn
    bare = Turn("" if calls else content, calls)
    assert llama3(write_llama3(bare)) == bare
    import keyword

    if not any(keyword.iskeyword(n) for c in calls for n in (c.name, *c.arguments)):
        assert gemma(write_gemma(turn)) == turn


TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "```tool_code\n",
        ]
        + ["```", "{", "}", '{"name": "f"', '"arguments": {}', ":", ",", ";", "f(", "a=1", ")", "["]
        + ["]", "<think>", "</think>", "\n", '"', "\\u12", "-1e999", "[" * 3000, "(" * 3000]
    ),
    max_size=8,
).map("".join)


@given(TEXTS)
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parse in (hermes, llama3, mistral, gemma):
        turn = parse(text)
        assert isinstance(turn.content, str)
        assert all(isinstance(c.arguments, dict) for c in turn.calls)


@pytest.mark.parametrize(
    ("parse", "text", "calls", "fault"),
    [
        (hermes, "<tool_call>{'a'}</tool_call>", 0, "a call is not JSON"),
        (hermes, '<tool_call>{"name": "f"}', 0, "was not closed"),
        (hermes, '<tool_call>{"nome": "f"}</tool_call>', 0, '"name" that is a text'),
        (hermes, '<tool_call>{"name": "f", "arguments": 3}</tool_call>', 0, "not an object"),
        (hermes, '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', 0, "are not JSON"),
        (llama3, '{"name": "f"} and more', 1, "nothing but calls"),
        (llama3, "<|python_tag|>print(1)", 0, "a call is not JSON"),
        (llama3, '{"name": "f"', 0, "a call is not JSON"),
        (mistral, "[TOOL_CALLS]f[ARGS]{", 0, "arguments of f are not JSON"),
        (mistral, "[TOOL_CALLS] nothing", 0, "a call is not JSON"),
        (gemma, "```tool_code\nf(1)\n```", 0, "must be given by name"),
        (gemma, "```tool_code\nf(a=b)\n```", 0, "must be literals"),
        (gemma, "```tool_code\nimport os\n```", 0, "expected a call such as"),
        (gemma, "```tool_code\nf(\n```", 0, "is not Python"),
        (gemma, "```tool_code\nf(a=1)", 0, "was not closed"),
    ],
)
def test_what_is_wrong_is_said(parse: Any, text: str, calls: int, fault: str) -> None:
    turn = parse(text)
    assert len(turn.calls) == calls and fault in turn.faults[0]


def test_other_ways_to_write_calls() -> None:
    one = (Call("f", {"a": 1}),)
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>').calls == one
    assert llama3('<|python_tag|>{"name": "f", "parameters": {"a": 1}}').calls == one
    assert mistral('[TOOL_CALLS]f[ARGS]{"a": 1}').calls == one
    assert mistral('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}').calls == (*one, Call("g"))
    assert gemma("Let me see.\n```tool_code\nprint(f(a=1))\n```").calls == one
    assert gemma("```tool_code\nsome.f(a=-1.5)\n```").calls == (Call("some.f", {"a": -1.5}),)


def test_calls_within_reasoning_are_not_made() -> None:
    text = '<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\n'
    turn = hermes(text + '<tool_call>{"name": "g"}</tool_call>')
    assert turn.calls == (Call("g"),) and "tool_call" in str(turn.reasoning)
    assert hermes(text.removeprefix("<think>") + "so") == Turn("so", (), (), turn.reasoning)
    assert hermes('<think>\n<tool_call>{"name": "f"}</tool_call>').calls == ()
    assert turn.message()["reasoning_content"] == turn.reasoning


def test_an_answer_in_json_is_an_answer() -> None:
    answer = '{"sum": 5}'
    turn = llama3(answer)
    assert turn == Turn(answer)
