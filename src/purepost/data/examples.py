"""Examples as token ids: what is trained, where it was cut, and what two completions share.

A prompt is encoded as it is when something is sampled after it; what follows it, together with it
where that leaves the prompt's ids as they are, else apart from it. A completion of text ends with
one EOS, a dialogue as its template says. What does not fit is cut at the end, and nothing is put in
its place; an example that then has nothing left to train is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from ..text import Tokenizer, encode_dialogue, encode_prompt
from .columns import Content, Tools
from .schema import Chat, Completion, Judgement, Preference, Prompt, Solution, Text


@dataclass(frozen=True)
class Tokens:
    """A piece of a sequence, and which of its tokens are trained."""

    ids: Int[np.ndarray, " t"]
    mask: Bool[np.ndarray, " t"]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Tree:
    """An example: a trunk, and the branches that each continue it and do not see one another."""

    trunk: Tokens
    branches: tuple[Tokens, ...] = ()
    labels: tuple[float, ...] = ()  # what the record says of the example
    cut: bool = False  # whether trained tokens did not fit

    @property
    def parts(self) -> tuple[Tokens, ...]:
        """Trunk and branches, as they lie in a row."""
        return (self.trunk, *self.branches)

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(len(part) for part in self.parts)

    @property
    def trained(self) -> int:
        """Trained tokens."""
        return sum(int(part.mask.sum()) for part in self.parts)


def demonstration(
    tokenizer: Tokenizer, example: Text | Chat | Completion, width: int, *, whole: bool
) -> Tree | None:
    """All of a document, the assistant's turns of a dialogue, or the completion of a prompt; with
    `whole` every token.
    """
    match example:
        case Text():
            begun = _begun(tokenizer, tokenizer.encode(example.text))
            ids = np.asarray(_ended(tokenizer, begun, 0), np.int32)
            mask = np.ones(len(ids), bool)
        case Chat():
            dialogue = encode_dialogue(tokenizer, example.messages, tools=example.tools)
            ids, mask = dialogue.ids, dialogue.mask
        case Completion():
            ids, mask, _ = _answer(tokenizer, example.prompt, example.completion, example.tools)
    return _fit(ids, np.ones(len(ids), bool) if whole else mask, width)


def preference(tokenizer: Tokenizer, example: Preference, width: int) -> Tree | None:
    """The prompt with two branches, chosen and rejected; the label is the margin.

    Each completion with its prompt has at most `width` tokens.
    """
    answers = [
        _answer(tokenizer, example.prompt, completion, example.tools)
        for completion in (example.chosen, example.rejected)
    ]
    shared = min(begin for _, _, begin in answers)
    fitted = [_fit(ids, mask, width) for ids, mask, _ in answers]
    branches = [
        Tokens(tree.trunk.ids[shared:], tree.trunk.mask[shared:]) for tree in fitted if tree
    ]
    if len(branches) < 2:
        return None
    trunk = answers[0][0][:shared]
    return Tree(
        Tokens(trunk, np.zeros(shared, bool)),
        tuple(branches),
        labels=(example.margin,),
        cut=any(tree.cut for tree in fitted if tree),
    )


def judgement(tokenizer: Tokenizer, example: Judgement, width: int) -> Tree | None:
    """Prompt and completion; the label is 1 for a good one."""
    ids, mask, _ = _answer(tokenizer, example.prompt, example.completion, example.tools)
    return _fit(ids, mask, width, labels=(float(example.label),))


def solution(tokenizer: Tokenizer, example: Solution, width: int, *, separator: str) -> Tree | None:
    """Prompt and steps, each followed by the separator, whose last token is marked in the mask; a
    label for each mark.
    """
    if isinstance(example.prompt, str):
        text, ids = example.prompt, tokenizer.encode(example.prompt)
        begun = _begun(tokenizer, ids)
        head = begun[: len(begun) - len(ids)]
    else:
        text, ids = "", []
        head = encode_prompt(tokenizer, example.prompt, tools=example.tools)
    ends = []
    for i, step in enumerate(example.completions):
        before, more = len(ids), step + separator
        ids = _extended(tokenizer, text, ids, more)
        text += more
        if len(ids) == before:
            raise ValueError(f"expected completions[{i}] to have tokens, got {step!r}")
        ends.append(len(head) + len(ids) - 1)
    mask = np.zeros(len(head) + len(ids), bool)
    mask[ends] = True
    labels = tuple(map(float, example.labels[: int(mask[:width].sum())]))
    return _fit(np.asarray([*head, *ids], np.int32), mask, width, labels=labels)


def prompt_ids(tokenizer: Tokenizer, example: Prompt) -> list[int]:
    """The ids after which a completion is sampled."""
    if isinstance(example.prompt, str):
        return _begun(tokenizer, tokenizer.encode(example.prompt))
    return encode_prompt(tokenizer, example.prompt, tools=example.tools)


def _answer(
    tokenizer: Tokenizer, prompt: Content, completion: Content, tools: Tools
) -> tuple[Int[np.ndarray, " t"], Bool[np.ndarray, " t"], int]:
    """(ids of prompt and completion, which of them the completion's author wrote, how many are the
    prompt's).
    """
    match prompt, completion:
        case str(), str():
            bare = tokenizer.encode(prompt)
            begin = len(_begun(tokenizer, bare))
            ids = _begun(tokenizer, _extended(tokenizer, prompt, bare, completion))
            ids = np.asarray(_ended(tokenizer, ids, begin), np.int32)
            return ids, np.arange(len(ids)) >= begin, begin
        case list(), list():
            dialogue = [*prompt, *completion]
            later = range(len(prompt), len(dialogue))
            turns = [i for i in later if dialogue[i]["role"] == "assistant"]
            encoded = encode_dialogue(tokenizer, dialogue, tools=tools, turns=turns)
            # Templates may open a turn otherwise than they write one; tokens may span the border.
            begin = _shared(encode_prompt(tokenizer, prompt, tools=tools), encoded.ids.tolist())
            if begin:
                return encoded.ids, encoded.mask, begin
            raise ValueError(
                "expected the prompt's tokens to begin the dialogue's, got other ones; the chat "
                "template does not write a prompt as it writes a dialogue: use another"
            )
    raise ValueError("expected prompt and completion to be both text or both messages")


def _fit(
    ids: Int[np.ndarray, " t"],
    mask: Bool[np.ndarray, " t"],
    width: int,
    *,
    labels: tuple[float, ...] = (),
) -> Tree | None:
    """As much of a sequence as `width` tokens allow, up to the last trained one: no other token
    would matter. None if none is trained; the first never is, since nothing comes before it.
    """
    mask = mask & (np.arange(len(mask)) > 0)
    kept = np.flatnonzero(mask[:width])
    if not len(kept):
        return None
    end = int(kept[-1]) + 1
    return Tree(Tokens(ids[:end], mask[:end]), labels=labels, cut=bool(mask[width:].any()))


def _extended(tokenizer: Tokenizer, text: str, ids: list[int], more: str) -> list[int]:
    """The ids of text + more that begin with the ids of the text."""
    whole = tokenizer.encode(text + more)
    return whole if whole[: len(ids)] == ids else ids + tokenizer.encode(more)


def _begun(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """One BOS where the model expects it, whether or not the text had it."""
    bos = tokenizer.bos_id
    if bos is None or not tokenizer.adds_bos or ids[:1] == [bos]:
        return ids
    return [bos, *ids]


def _ended(tokenizer: Tokenizer, ids: list[int], begin: int) -> list[int]:
    """One EOS at the end of what follows `begin`, whether or not the text had it."""
    if len(ids) > begin and ids[-1] in tokenizer.eos_ids:
        return ids
    return [*ids, tokenizer.eos_ids[0]]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    same = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(same, min(len(a), len(b)))
