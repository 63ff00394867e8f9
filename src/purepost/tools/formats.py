"""Calls of tools as each family's models write them.

A parser never raises: what looks like a call and is none is a fault, in words that can be shown to
the model. Calls inside reasoning (<think>...</think>) are not made.
"""

import ast
import json
import re
from typing import Any

from .messages import Call, Turn

_THINK = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_GEMMA = re.compile(r"```tool_code[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_ARGS = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")


def hermes(text: str) -> Turn:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as many as wanted: Qwen2.5, Qwen3,
    Hermes.
    """
    reasoning, text = _without_reasoning(text)
    calls, faults = [], []
    for match in _HERMES.finditer(text):
        if not match.group().endswith("</tool_call>"):
            faults.append("a <tool_call> was not closed")
            continue
        _read(match.group(1), calls, faults)
    return Turn(_HERMES.sub("", text).strip(), tuple(calls), tuple(faults), reasoning)


def llama3(text: str) -> Turn:
    """{"name": ..., "parameters": {...}} as the whole turn, perhaps behind <|python_tag|>; several
    are separated by semicolons: Llama 3.1 and later.
    """
    reasoning, text = _without_reasoning(text)
    before, tag, body = text.partition("<|python_tag|>")
    if not tag:
        before, body = "", text
    body = body.strip()
    if not tag and not (body.startswith("{") and '"name"' in body):  # JSON may be an answer
        return Turn(text.strip(), (), (), reasoning)
    calls: list[Call] = []
    faults: list[str] = []
    decoder = json.JSONDecoder(strict=False)
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            faults.append(f"a call is not JSON: {error}")
            break
        _take(value, calls, faults)
        body = body[end:].lstrip()
        if body and not body.startswith(";"):
            faults.append("expected nothing but calls separated by ';'")
            break
        body = body[1:].lstrip()
    return Turn(before.strip(), tuple(calls), tuple(faults), reasoning)


def mistral(text: str) -> Turn:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or since its eleventh tokenizer
    [TOOL_CALLS]name[ARGS]{...} for each: Mistral.
    """
    reasoning, text = _without_reasoning(text)
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    faults: list[str] = []
    for part in parts:
        named = _ARGS.match(part)
        if named is None:
            _read(part, calls, faults)
            continue
        try:
            arguments = json.loads(part[named.end() :], strict=False)
        except (ValueError, RecursionError) as error:
            faults.append(f"the arguments of {named.group(1)} are not JSON: {error}")
            continue
        _take({"name": named.group(1), "arguments": arguments}, calls, faults)
    return Turn(content.strip(), tuple(calls), tuple(faults), reasoning)


def gemma(text: str) -> Turn:
    """Calls in Python's syntax, name(argument=literal), one a line, in a block of ```tool_code:
    Gemma 3, as its guide to function calling asks for it.

    The block is read, never run: arguments are literals, given by name.
    """
    reasoning, text = _without_reasoning(text)
    calls: list[Call] = []
    faults: list[str] = []
    for match in _GEMMA.finditer(text):
        if not match.group().endswith("```"):
            faults.append("a ```tool_code block was not closed")
            continue
        try:
            for line in ast.parse(match.group(1).strip()).body:
                _literal_call(line, calls, faults)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            faults.append(f"a ```tool_code block is not Python: {error}")
    return Turn(_GEMMA.sub("", text).strip(), tuple(calls), tuple(faults), reasoning)


def write_hermes(turn: Turn) -> str:
    """The turn as a model of the `hermes` format writes it."""
    calls = [
        f"<tool_call>\n{_json({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
        for c in turn.calls
    ]
    said = "\n".join([turn.content] * bool(turn.content or not calls) + calls)
    return said if turn.reasoning is None else f"<think>\n{turn.reasoning}\n</think>\n\n{said}"


def write_llama3(turn: Turn) -> str:
    """The turn as a model of the `llama3` format writes it: calls without anything beside them."""
    calls = [_json({"name": c.name, "parameters": c.arguments}) for c in turn.calls]
    return "; ".join(calls) if calls else turn.content


def write_mistral(turn: Turn) -> str:
    """The turn as a model of the `mistral` format writes it."""
    calls = [{"name": c.name, "arguments": c.arguments} for c in turn.calls]
    return turn.content + (f"[TOOL_CALLS] {_json(calls)}" if calls else "")


def write_gemma(turn: Turn) -> str:
    """The turn as a model of the `gemma` format writes it."""
    lines = [
        f"{c.name}({', '.join(f'{name}={value!r}' for name, value in c.arguments.items())})"
        for c in turn.calls
    ]
    block = ["```tool_code\n" + "\n".join(lines) + "\n```"] if lines else []
    return "\n".join([turn.content] * bool(turn.content) + block)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning, the rest); reasoning that is not closed is all there is."""
    match = _THINK.match(text)
    if match:
        return match.group(1).strip("\n"), text[match.end() :]
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>").strip("\n"), ""
    return None, text


def _read(text: str, calls: list[Call], faults: list[str]) -> None:
    """Add the calls that are written as JSON."""
    try:
        value = json.loads(text.strip(), strict=False)
    except (ValueError, RecursionError) as error:
        faults.append(f"a call is not JSON: {error}")
        return
    for one in value if isinstance(value, list) else [value]:
        _take(one, calls, faults)


def _take(value: Any, calls: list[Call], faults: list[str]) -> None:
    """Add a call that was read from JSON, under any of the names in use for its arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        faults.append('a call needs a "name" that is a text')
        return
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as some interfaces have it
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as error:
            faults.append(f"the arguments of {value['name']} are not JSON: {error}")
            return
    if not isinstance(arguments, dict):
        faults.append(f"the arguments of {value['name']} are not an object of names and values")
        return
    calls.append(Call(value["name"], arguments))


def _literal_call(line: ast.stmt, calls: list[Call], faults: list[str]) -> None:
    """Add a call that was read from Python, perhaps within print(...)."""
    match line:
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[ast.Call() as call])):
            pass
        case ast.Expr(value=ast.Call() as call):
            pass
        case _:
            faults.append("expected a call such as name(argument=1) on each line of ```tool_code")
            return
    name = ast.unparse(call.func)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        faults.append(f"the arguments of {name} must be given by name")
        return
    try:
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        faults.append(f"the arguments of {name} must be literals")
        return
    calls.append(Call(name, arguments))
