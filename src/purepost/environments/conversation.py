"""Dialogues between a policy that reads and says ids and environments that know texts.

Ids are what was sampled: a turn's prompt is the prompt before, the ids that were drawn, and what
the chat template puts behind them. Where the template rewrites what came before (it drops
reasoning, say), the text begins anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..rollout.async_environment import Anew, Seen
from ..text.chat import Tools, encode_prompt, render
from ..text.tokenizer import Tokenizer
from .workers import Message


def plain_message(said: str) -> Message:
    """The policy's turn as it said it, calls of tools and reasoning included."""
    return {"role": "assistant", "content": said}


@dataclass(frozen=True)
class Style:
    """How dialogues are written."""

    tokenizer: Tokenizer
    stop_ids: Sequence[int]  # that end a turn
    message: Callable[[str], Message] = plain_message
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """A dialogue up to where the policy goes on."""
        return encode_prompt(self.tokenizer, messages, tools=self.tools, variables=self.variables)

    def text(self, messages: Sequence[Message]) -> str:
        """The same as a text."""
        t = self.tokenizer
        tokens = {"bos_token": t.bos_id, "eos_token": t.eos_ids[0], "pad_token": t.pad_id}
        return render(
            t.chat_template,
            messages,
            add_generation_prompt=True,
            tools=self.tools,
            **{name: t.token(i) for name, i in tokens.items()},
            **self.variables,
        )

    def said(self, new: Sequence[int]) -> str:
        """What a turn says, without the token that ends it."""
        ended = bool(new) and new[-1] in self.stop_ids
        return self.tokenizer.decode(new[:-1] if ended else new, skip_special=False)


@dataclass
class Conversation:
    """A dialogue that is under way."""

    style: Style
    messages: list[Message] = field(default_factory=list)
    text: str = ""  # of the prompt of the turn that is to come

    def begin(self, messages: Sequence[Message]) -> Anew:
        """The first prompt. Error: messages that the template does not take."""
        self.messages = list(messages)
        self.text = self.style.text(self.messages)
        return Anew(self.style.ids(self.messages))

    def go_on(self, new: Sequence[int], messages: Sequence[Message]) -> Seen:
        """What follows the ids of a turn and its answer, up to the next turn, or the whole prompt
        where the template rewrites it. Error: messages that it does not take.
        """
        before, said = self.text, self.style.said(new)
        self.messages += [self.style.message(said), *messages]
        self.text = self.style.text(self.messages)
        suffix = _behind(self.text, before, said)
        if suffix is None:
            return Anew(self.style.ids(self.messages))
        added = self.style.tokenizer.encode(suffix)
        # The template ends the turn, where the policy has not.
        return added[1:] if added[:1] == list(new[-1:]) else added


def _behind(text: str, before: str, said: str) -> str | None:
    """What the template puts behind a turn, or None where it rewrites what came before. White space
    around a turn is the template's own affair.
    """
    rest, said = text[len(before) :].lstrip(), said.strip()
    return rest[len(said) :] if text.startswith(before) and rest.startswith(said) else None
