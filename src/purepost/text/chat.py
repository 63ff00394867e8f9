"""Dialogues as text and ids by the model's own chat template, and which ids the assistant wrote.

What the assistant wrote is found by roles: either the template marks it with `{% generation %}`,
or every prefix of the dialogue is rendered, and the text of turn i is what is new after the prompt
of turns < i. The turn's closing token belongs to it, white space after that does not: the model
never writes it. Calls of tools are the assistant's, their results are not.

A message is JSON: "role", "content" (a text, or parts with texts in them), and what the template
reads beside them, such as "tool_calls" and "reasoning_content" ("thinking" and "reasoning" are
other names for it). A field that is None counts as absent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro

from .sandbox import run_template
from .tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

# Put around what a template marks, and after a message to go on with; no message may hold one.
_BEGIN, _END, _CONTINUE = "\x00generation\x00", "\x00end\x00", "\x00continue\x00"
_REASONING = ("reasoning_content", "thinking", "reasoning")


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
    continue_final: bool = False,
    tools: Tools | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """The text of a dialogue. `add_generation_prompt` ends it by opening an assistant turn,
    `continue_final` within the last message, for the model to go on with.

    Raises: ValueError when there is no template, or the template refuses these messages.
    """
    fixed = dict(variables, tools=tools, bos_token=bos_token, eos_token=eos_token)
    if not continue_final:
        return _unmarked(_render(template, messages, add_generation_prompt, fixed))
    if add_generation_prompt:
        raise ValueError(
            "expected either a new turn or the last one to be continued, got both; leave out "
            "add_generation_prompt or continue_final"
        )
    return _unfinished(template, messages, fixed)


def encode_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    continue_final: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a dialogue up to the opening of the assistant's next turn, or, with
    `continue_final`, to the end of what the last message says."""
    fixed = _variables(tokenizer, tools, variables)
    if continue_final:
        text = _unfinished(tokenizer.chat_template, messages, fixed)
    else:
        text = _unmarked(_render(tokenizer.chat_template, messages, True, fixed))
    return _one_bos(tokenizer, tokenizer.encode(text))


def encode_dialogue(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    turns: Sequence[int] | None = None,
    max_length: int | None = None,
) -> Dialogue:
    """The ids of a whole dialogue and the mask of what the assistant wrote.

    `turns` are the indices of the messages that count as the assistant's: all of its role when
    None. Beyond `max_length` tokens it is cut at the end; nothing is put in place of what was cut.
    Raises: ValueError for a dialogue without assistant turns, a template that rewrites one of
    `turns`, and a mask that is all zero or all one.
    """
    if max_length is not None and max_length < 1:
        raise ValueError(f"expected max_length >= 1, got {max_length}; leave it out to keep all")
    fixed = _variables(tokenizer, tools, variables)
    text, spans = _spans(tokenizer.chat_template, messages, _chosen(messages, turns), fixed)
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


def rewrites_history(
    template: str | None,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> int | None:
    """The first assistant message that reads otherwise in the whole dialogue than when the model
    wrote it, or None: reasoning dropped from earlier turns, for one.

    An episode of several turns can be kept as one row of tokens only where this is None.
    """
    fixed = dict(variables, tools=tools, bos_token=bos_token, eos_token=eos_token)
    whole = _unmarked(_render(template, messages, False, fixed))
    for i in _chosen(messages, None):
        if _turn(template, messages, i, whole, fixed) is None:
            return i
    return None


def _chosen(messages: Sequence[Message], turns: Sequence[int] | None) -> list[int]:
    """The indices of the messages that count as the assistant's, in order."""
    written = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not written:
        raise ValueError(
            "expected at least one message of role 'assistant', got none; there is nothing to "
            "learn, so leave this dialogue out"
        )
    if turns is not None and not (turns and set(turns) <= set(written)):
        raise ValueError(
            f"expected turns among the assistant's messages {written}, got {list(turns)}; "
            "name at least one of them"
        )
    return written if turns is None else sorted(set(turns))


def _turn(
    template: str | None,
    messages: Sequence[Message],
    i: int,
    whole: str,
    variables: Mapping[str, Any],
) -> Span | None:
    """The characters [start, end) of assistant message i, None where it is rewritten later."""
    prompt = _unmarked(_render(template, messages[:i], True, variables))
    turn = _unmarked(_render(template, messages[: i + 1], False, variables))
    kept = turn.startswith(prompt) and whole.startswith(turn)
    return (len(prompt), len(turn)) if kept else None


def _spans(
    template: str | None,
    messages: Sequence[Message],
    turns: Sequence[int],
    variables: Mapping[str, Any],
) -> tuple[str, list[Span]]:
    """A dialogue's text, and the characters [start, end) of each assistant turn."""
    whole = _render(template, messages, False, variables)
    if _BEGIN in whole:
        text, marked = _cut_markers(whole)
        written = _chosen(messages, None)
        if len(turns) == len(written):
            return text, marked
        if len(marked) != len(written):
            raise ValueError(
                f"expected one marked text for each of {len(written)} assistant messages, got "
                f"{len(marked)}; train on all turns, or take {{% generation %}} out"
            )
        return text, [span for i, span in zip(written, marked, strict=True) if i in turns]
    spans: list[Span] = []
    for i in turns:
        span = _turn(template, messages, i, whole, variables)
        if span is None:
            raise ValueError(
                f"expected the text up to message {i} to begin the whole dialogue's, got another: "
                "the chat template rewrites earlier turns; train one dialogue per assistant turn "
                "(messages[: i + 1] with turns=[i]), or mark the assistant's text in the template "
                "with {% generation %}"
            )
        spans.append(span)
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


def _unmarked(text: str) -> str:
    return text.replace(_BEGIN, "").replace(_END, "")


def _token_mask(
    tokenizer: Tokenizer,
    text: str,
    ids: Sequence[int],
    offsets: Sequence[Span],
    spans: Sequence[Span],
) -> Bool[np.ndarray, " t"]:
    """Which tokens overlap a span; each span ends with its closing token, if it has one."""
    mask = np.zeros(len(ids), bool)
    ends = tokenizer.special_ids | set(tokenizer.eos_ids)
    for start, end in spans:
        inside = [i for i, at in enumerate(offsets) if _overlaps(at, start, end)]
        if not inside:
            continue
        last = inside[-1]
        closing = [i for i in inside if ids[i] in ends]
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


def _variables(
    tokenizer: Tokenizer, tools: Tools | None, more: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a template may name beside the messages."""
    return {
        "tools": tools,
        "bos_token": tokenizer.token(tokenizer.bos_id),
        "eos_token": tokenizer.token(tokenizer.eos_ids[0]),
        "pad_token": tokenizer.token(tokenizer.pad_id),
        **({} if more is None else more),
    }


def _unfinished(
    template: str | None, messages: Sequence[Message], variables: Mapping[str, Any]
) -> str:
    """The text up to the end of what the last message says."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise ValueError(
            f"expected a last message whose content is a text, got {type(content).__name__}; "
            "give it the beginning of the answer"
        )
    whole = _render(template, messages, False, variables, mark_end=True)
    said, mark, after = whole.rpartition(_CONTINUE)
    if not mark or content.strip() not in said:
        raise ValueError(
            "expected the chat template to write out the last message, got a text without some of "
            "it; open a new turn instead"
        )
    # A template that trims its messages trims the white space after our mark.
    return _unmarked(said if after.startswith(" ") else said.rstrip())


def _render(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    *,
    mark_end: bool = False,
) -> str:
    """The text with markers in it."""
    if template is None:
        raise ValueError(
            "expected a chat template, got None; give the tokenizer one, or train on plain text"
        )
    given = {
        "documents": None,
        **variables,
        "messages": [_with_reasoning(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
    }
    plain = _plain(given, depth=0)
    if mark_end:
        plain["messages"][-1]["content"] += _CONTINUE + " "
    try:
        return run_template(template, (_Generation,), plain)
    except Exception as error:  # a template can raise whatever its operations do
        roles = [str(message.get("role")) for message in messages]
        raise ValueError(
            f"expected messages that the chat template accepts, got roles {roles}: {error}; "
            "change the messages or the template"
        ) from error


def _with_reasoning(message: Message) -> dict[str, Any]:
    """A message without absent fields, its reasoning under each of the names in use."""
    given = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING:
        if name in given:
            return {"thinking": given[name], **given, "reasoning_content": given[name]}
    return given


def _plain(value: Any, depth: int) -> Any:
    """A copy made of JSON's types only, whose methods the sandbox knows."""
    if depth > 64:
        raise ValueError("expected messages nested at most 64 deep, got deeper ones; flatten them")
    match value:
        case None | bool():
            return value
        case str():
            if any(mark in value for mark in (_BEGIN, _END, _CONTINUE)):
                raise ValueError("expected messages without generation markers, got one; remove it")
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [_plain(item, depth + 1) for item in value]
    raise ValueError(
        f"expected messages, tools and variables of JSON's types, got {type(value).__name__}; "
        "convert it"
    )
