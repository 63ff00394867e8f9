"""Records as token ids: what is trained, one EOS where a completion ends, none where it was cut."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from purepost.data.examples import (
    Tree,
    demonstration,
    judgement,
    preference,
    prompt_ids,
    solution,
)
from purepost.data.schema import Chat, Completion, Judgement, Preference, Prompt, Solution, Text
from purepost.text import Tokenizer


def turns(*contents: str) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


def sft(tokenizer: Tokenizer, example: Any, width: int = 99, whole: bool = False) -> Tree | None:
    return demonstration(tokenizer, example, width, whole=whole)


def shown(tree: Tree | None) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of the trunk and of each branch."""
    assert tree is not None
    return [(part.ids.tolist(), part.mask.astype(int).tolist()) for part in tree.parts]


def test_documents_are_trained_whole_but_for_their_first_token(
    tokenizer: Tokenizer, with_bos: Tokenizer
) -> None:
    assert shown(sft(tokenizer, Text("w10 w11"))) == [([10, 11, 3], [0, 1, 1])]
    assert shown(sft(with_bos, Text("w10 w11"))) == [([0, 10, 11, 3], [0, 1, 1, 1])]
    # What the text has already is not put there again.
    assert shown(sft(with_bos, Text("<s> w10 <e>"))) == [([0, 10, 3], [0, 1, 1])]


def test_a_completion_is_trained_with_its_end(tokenizer: Tokenizer, with_bos: Tokenizer) -> None:
    example = Completion("w10 w11", " w12", None)
    assert shown(sft(tokenizer, example)) == [([10, 11, 12, 3], [0, 0, 1, 1])]
    assert shown(sft(with_bos, example)) == [([0, 10, 11, 12, 3], [0, 0, 0, 1, 1])]
    assert shown(sft(tokenizer, example, whole=True)) == [([10, 11, 12, 3], [0, 1, 1, 1])]
    assert shown(sft(tokenizer, Completion("w10 <e>", "", None))) == [([10, 3, 3], [0, 0, 1])]


def test_the_assistants_turns_of_a_dialogue_are_trained(tokenizer: Tokenizer) -> None:
    four = turns("w10", "w11", "w12", "w13")
    ids, mask = [1, 10, 3, 2, 11, 3, 1, 12, 3, 2, 13, 3], [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert shown(sft(tokenizer, Chat(four, None))) == [(ids, mask)]
    # What comes after the last trained token would matter to nothing.
    assert shown(sft(tokenizer, Chat([*four, *turns("w14")], None))) == [(ids, mask)]
    last = Completion(four[:3], four[3:], None)
    assert shown(sft(tokenizer, last)) == [(ids, [0] * 10 + [1, 1])]


@pytest.mark.parametrize(("width", "targets", "length"), [(12, 4, 12), (11, 3, 11), (8, 2, 6)])
def test_what_is_cut_gets_no_end(
    tokenizer: Tokenizer, width: int, targets: int, length: int
) -> None:
    tree = sft(tokenizer, Chat(turns("w10", "w11", "w12", "w13"), None), width)
    ((ids, mask),) = shown(tree)
    assert ids == [1, 10, 3, 2, 11, 3, 1, 12, 3, 2, 13, 3][:length]
    assert sum(mask) == targets and tree is not None and tree.cut == (targets < 4)


def test_nothing_is_left_of_an_example_whose_targets_are_cut(tokenizer: Tokenizer) -> None:
    assert sft(tokenizer, Chat(turns("w10", "w11", "w12", "w13"), None), 4) is None
    assert sft(tokenizer, Completion("w10 w11", "w12", None), 2) is None
    assert sft(tokenizer, Text("")) is None  # an end alone: nothing comes before it
    assert preference(tokenizer, Preference("w10 w11", "w12", "w13", 0.0, None), 2) is None
    assert judgement(tokenizer, Judgement("w10 w11", "w12", True, None), 2) is None
    assert solution(tokenizer, Solution("w10", ["w11"], [True], None), 1, separator="") is None


def test_preferences_share_their_prompt(tokenizer: Tokenizer) -> None:
    text = Preference("w10 w11", "w12", "w12 w13", 0.5, None)
    tree = preference(tokenizer, text, 99)
    assert shown(tree) == [([10, 11], [0, 0]), ([12, 3], [1, 1]), ([12, 13, 3], [1, 1, 1])]
    assert tree is not None and tree.labels == (0.5,) and not tree.cut
    cut = preference(tokenizer, text, 4)
    assert shown(cut) == [([10, 11], [0, 0]), ([12, 3], [1, 1]), ([12, 13], [1, 1])]
    assert cut is not None and cut.cut
    talk = turns("w10", "w11", "w12", "w13")
    chat = Preference(talk[:3], talk[3:], [talk[3] | {"content": "w14 w15"}], 0.0, None)
    assert shown(preference(tokenizer, chat, 99)) == [
        ([1, 10, 3, 2, 11, 3, 1, 12, 3, 2], [0] * 10),
        ([13, 3], [1, 1]),
        ([14, 15, 3], [1, 1, 1]),
    ]


def test_judgements_have_their_label(tokenizer: Tokenizer) -> None:
    for label in (True, False):
        tree = judgement(tokenizer, Judgement("w10", "w11", label, None), 99)
        assert shown(tree) == [([10, 11, 3], [0, 1, 1])]
        assert tree is not None and tree.labels == (float(label),)


def test_steps_are_marked_where_they_end(tokenizer: Tokenizer, with_bos: Tokenizer) -> None:
    example = Solution("w10", ["w11 w12", "w13"], [True, False], None)
    tree = solution(tokenizer, example, 99, separator=" w9 ")
    assert shown(tree) == [([10, 11, 12, 9, 13, 9], [0, 0, 0, 1, 0, 1])]
    assert tree is not None and tree.labels == (1.0, 0.0)
    cut = solution(with_bos, example, 6, separator=" w9 ")
    assert shown(cut) == [([0, 10, 11, 12, 9], [0, 0, 0, 0, 1])]
    assert cut is not None and cut.labels == (1.0,) and cut.cut
    chat = replace(example, prompt=turns("w10"))
    assert shown(solution(tokenizer, chat, 99, separator="")) == [
        ([1, 10, 3, 2, 11, 12, 13], [0, 0, 0, 0, 0, 1, 1])
    ]
    with pytest.raises(ValueError, match=r"completions\[1\] to have tokens, got ''"):
        solution(tokenizer, replace(example, completions=["w11", ""]), 99, separator="")


def test_a_prompt_keeps_the_ids_that_sampling_gives_it() -> None:
    """Where a token would reach over the border, the two sides are encoded apart."""
    vocab = {"<e>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, "bc": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c")]))
    tokenizer = Tokenizer(backend, None, (0,), 0, None)
    assert tokenizer.encode("cab") == [4, 3] and tokenizer.encode("ca") == [4, 1]
    assert shown(sft(tokenizer, Completion("ca", "bc", None))) == [([4, 1, 5, 0], [0, 0, 1, 1])]
    assert shown(sft(tokenizer, Completion("ca", "ca", None))) == [
        ([4, 1, 4, 1, 0], [0, 0, 1, 1, 1])
    ]
    tree = preference(tokenizer, Preference("ca", "b", "c", 0.0, None), 99)
    assert [part.ids.tolist() for part in tree.parts] == [[4, 1], [2, 0], [4, 0]] if tree else False


def test_prompts_as_sampling_has_them(tokenizer: Tokenizer, with_bos: Tokenizer) -> None:
    assert prompt_ids(tokenizer, Prompt("w10", None)) == [10]
    assert prompt_ids(with_bos, Prompt("w10", None)) == [0, 10]
    assert prompt_ids(with_bos, Prompt(turns("w10"), None)) == [0, 1, 10, 3, 2]


def test_sizes_are_counted(tokenizer: Tokenizer) -> None:
    tree = preference(tokenizer, Preference("w10 w11", "w12", "w12 w13", 0.5, None), 99)
    assert tree is not None and (tree.size, tree.trained) == (7, 5)
    assert all(part.ids.dtype == np.int32 for part in tree.parts)
