"""Dialogues as text and ids by the model's own chat template, and which ids the assistant wrote.

A template is a Jinja program that came with a model, so it runs in a sandbox. What the assistant
wrote is found by roles: either the template marks it with `{% generation %}`, or every prefix of
the dialogue is rendered, and the text of turn i is what is new after the prompt of turns < i. The
turn's closing token belongs to it, white space after that does not: the model never writes it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Bool, Int
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

# Put around what a template marks; a message that holds one is refused.
_BEGIN, _END = "\x00generation\x00", "\x00end\x00"


@dataclass(frozen=True)
class Dialogue:
    """A dialogue's ids and which of them the assistant wrote, turn ends included.

    A truncated one may have lost every assistant token: check `mask.any()` before training on it.
    """

    ids: Int[np.ndarray, " t"]
    mask: Bool[np.ndarray, " t"]
    truncated: bool


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: the text inside was written by the assistant."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Wrap the block's output in two markers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return _BEGIN + caller() + _END


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Tools | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """The text of a dialogue; `add_generation_prompt` ends it by opening an assistant turn.

    Raises: ValueError when there is no template, or the template refuses these messages.
    """
    fixed = dict(variables, tools=tools, bos_token=bos_token, eos_token=eos_token)
    text = _render(template, messages, add_generation_prompt, fixed)
    return text.replace(_BEGIN, "").replace(_END, "")


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Tools | None = None
) -> list[int]:
    """The ids of a dialogue up to the opening of the assistant's next turn."""
    text = _render(tokenizer.chat_template, messages, True, _variables(tokenizer, tools))
    return _one_bos(tokenizer, tokenizer.encode(text.replace(_BEGIN, "").replace(_END, "")))


def encode_dialogue(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    max_length: int | None = None,
) -> Dialogue:
    """The ids of a whole dialogue and the mask of what the assistant wrote.

    Beyond `max_length` tokens it is cut at the end; nothing is put in place of what was cut.
    Raises: ValueError for a dialogue without assistant turns, a template that rewrites earlier
    turns, and a mask that is all zero or all one.
    """
    if not any(message.get("role") == "assistant" for message in messages):
        raise ValueError(
            "expected at least one message of role 'assistant', got none; there is nothing to "
            "learn, so leave this dialogue out"
        )
    if max_length is not None and max_length < 1:
        raise ValueError(f"expected max_length >= 1, got {max_length}; leave it out to keep all")
    text, spans = _spans(tokenizer, messages, _variables(tokenizer, tools))
    ids, offsets = tokenizer.encode_spans(text)
    mask = _token_mask(tokenizer, text, ids, offsets, spans)
    if mask.all() or not mask.any():
        raise ValueError(
            f"expected some of the {len(ids)} tokens to be the assistant's, got {int(mask.sum())}; "
            "the chat template does not tell the roles apart: use another"
        )
    whole = _one_bos(tokenizer, ids)
    added = len(whole) - len(ids)  # BOS put before, or taken away where it stood twice
    mask = np.concatenate([np.zeros(max(added, 0), bool), mask[max(-added, 0) :]])
    kept = len(whole) if max_length is None else min(max_length, len(whole))
    return Dialogue(np.asarray(whole[:kept], np.int32), mask[:kept], truncated=kept < len(whole))


def _spans(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """A dialogue's text, and the characters [start, end) of each assistant turn."""
    template = tokenizer.chat_template
    whole = _render(template, messages, False, variables)
    if _BEGIN in whole:
        return _cut_markers(whole)
    spans: list[Span] = []
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        prompt = _render(template, messages[:i], True, variables)
        turn = _render(template, messages[: i + 1], False, variables)
        if not (turn.startswith(prompt) and whole.startswith(turn)):
            raise ValueError(
                f"expected the text up to message {i} to begin the whole dialogue's, got another: "
                "the chat template rewrites earlier turns; train one dialogue per assistant turn, "
                "or mark the assistant's text in the template with {% generation %}"
            )
        spans.append((len(prompt), len(turn)))
    return whole, spans


def _cut_markers(marked: str) -> tuple[str, list[Span]]:
    """Take the markers out of a text and say what stood between them."""
    text, spans = "", []
    for piece in marked.split(_BEGIN):
        inside, end, after = piece.partition(_END)
        if end:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _token_mask(
    tokenizer: Tokenizer,
    text: str,
    ids: Sequence[int],
    offsets: Sequence[Span],
    spans: Sequence[Span],
) -> Bool[np.ndarray, " t"]:
    """Which tokens overlap a span; each span ends with its closing token, if it has one."""
    mask = np.zeros(len(ids), bool)
    special = tokenizer.special_ids
    for start, end in spans:
        inside = [i for i, at in enumerate(offsets) if _overlaps(at, start, end)]
        if not inside:
            continue
        last = inside[-1]
        closing = [i for i in inside if ids[i] in special]
        if closing and not text[offsets[closing[-1]][1] : end].strip():
            last = closing[-1]
        elif last + 1 < len(ids) and ids[last + 1] in tokenizer.eos_ids:
            last += 1
        mask[inside[0] : last + 1] = True
    return mask


def _overlaps(at: Span, start: int, end: int) -> bool:
    """Some tokenizers give white space no width: such a token counts where it ends."""
    return at[0] < end and at[1] > start if at[0] < at[1] else start < at[0] <= end


def _one_bos(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Exactly one BOS where the model expects it, whether or not the template writes it."""
    bare = list(ids)
    if not tokenizer.adds_bos or tokenizer.bos_id is None:
        return bare
    while bare[:1] == [tokenizer.bos_id]:
        bare = bare[1:]
    return [tokenizer.bos_id, *bare]


def _variables(tokenizer: Tokenizer, tools: Tools | None) -> dict[str, Any]:
    """What a template may name beside the messages."""
    return {
        "tools": tools,
        "bos_token": tokenizer.token(tokenizer.bos_id),
        "eos_token": tokenizer.token(tokenizer.eos_ids[0]),
        "pad_token": tokenizer.token(tokenizer.pad_id),
    }


def _render(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The text with markers in it."""
    if template is None:
        raise ValueError(
            "expected a chat template, got None; give the tokenizer one, or train on plain text"
        )
    if _holds_marker(messages):
        raise ValueError("expected messages without generation markers, got one; remove it")
    try:
        return _compile(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
        )
    except (TemplateError, TypeError) as error:
        roles = [str(message.get("role")) for message in messages]
        raise ValueError(
            f"expected messages that the chat template accepts, got roles {roles}: {error}; "
            "change the messages or the template"
        ) from error


@lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    """The program of a template, in a sandbox that lets it change nothing."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now)
    return environment.from_string(template)


def _holds_marker(value: Any) -> bool:
    """Whether a text anywhere in a message would pass for a marker of ours."""
    match value:
        case str():
            return _BEGIN in value or _END in value
        case Mapping():
            return any(map(_holds_marker, value.values()))
        case Sequence():
            return any(map(_holds_marker, value))
    return False


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, keys in their order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
