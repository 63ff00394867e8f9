"""Chat templates against transformers' (tests/golden/make.py), and assistant masks by roles."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from purepost.text import Dialogue, Tokenizer, encode_dialogue, encode_prompt, render

GOLDEN = Path(__file__).parents[1] / "golden"
CHAT = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))

USER, ASSISTANT, END = 1, 2, 3
# Case 8's tokens: one for each role, one that ends a turn, and the words "w10" to "w13".
CASE = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<e>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<e>{% else %}<a>"
    "{% generation %}{{ m.content }}<e>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def make_tokenizer(template: str | None, *, bos: bool = False) -> Tokenizer:
    vocab = {"<s>": 0, "<u>": USER, "<a>": ASSISTANT, "<e>": END}
    vocab |= {f"w{i}": i for i in range(4, 20)}
    backend = Backend(models.WordLevel(vocab, unk_token="w4"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "<u>", "<a>", "<e>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return Tokenizer(backend, 0, (END,), 0, template)


def turns(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


FOUR = turns("w10", "w11", "w12", "w13")


@pytest.mark.parametrize("row", CHAT, ids=lambda row: f"{row['name']}-{len(row['messages'])}")
def test_text_equals_transformers(row: dict[str, Any]) -> None:
    got = render(
        row["template"],
        row["messages"],
        add_generation_prompt=row["prompt"],
        tools=row["tools"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    assert got == row["text"]


@pytest.mark.parametrize("template", [CASE, MARKED])
def test_mask_covers_assistant_turns_and_their_ends(template: str) -> None:
    dialogue = encode_dialogue(make_tokenizer(template), FOUR)
    assert dialogue.ids.tolist() == [1, 10, 3, 2, 11, 3, 1, 12, 3, 2, 13, 3]
    assert dialogue.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert not dialogue.truncated


@pytest.mark.parametrize("template", [CASE, MARKED])
def test_truncation_invents_no_end(template: str) -> None:
    tokenizer = make_tokenizer(template)
    eleven = encode_dialogue(tokenizer, FOUR, max_length=11)
    assert eleven.ids.tolist() == [1, 10, 3, 2, 11, 3, 1, 12, 3, 2, 13]
    assert int(eleven.mask.sum()) == 3 and eleven.truncated
    four = encode_dialogue(tokenizer, FOUR, max_length=4)
    assert four.ids.tolist() == [1, 10, 3, 2]
    assert not four.mask.any() and four.truncated
    assert not encode_dialogue(tokenizer, FOUR, max_length=12).truncated
    with pytest.raises(ValueError, match="expected max_length >= 1, got 0"):
        encode_dialogue(tokenizer, FOUR, max_length=0)


def test_an_end_outside_the_marks_is_learnt_all_the_same() -> None:
    template = MARKED.replace("<e>{% endgeneration %}", "{% endgeneration %}<e>")
    dialogue = encode_dialogue(make_tokenizer(template), FOUR)
    assert np.flatnonzero(dialogue.mask).tolist() == [4, 5, 10, 11]


def test_marked_mask_equals_transformers(smollm2: Tokenizer) -> None:
    rows = [row for row in CHAT if any(row.get("mask", []))]
    assert len(rows) == 2
    for row in rows:
        dialogue = encode_dialogue(replace(smollm2, chat_template=row["template"]), row["messages"])
        assert dialogue.ids.tolist() == row["ids"]
        assert dialogue.mask.astype(int).tolist() == row["mask"]


def test_white_space_after_the_end_is_not_learnt(smollm2: Tokenizer) -> None:
    messages = CHAT[-1]["messages"]
    dialogue = encode_dialogue(smollm2, messages)
    learnt = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert len(learnt) == 2
    got = smollm2.decode(dialogue.ids[dialogue.mask], skip_special=False)
    assert got == "".join(learnt)
    text = smollm2.decode(dialogue.ids, skip_special=False)
    assert text == render(smollm2.chat_template, messages, add_generation_prompt=False)
    assert text.endswith("Wien<|im_end|>\n")


def golden_tokenizer(template: str) -> Tokenizer:
    """The byte-level tokenizer of a golden model, with another template."""
    return replace(Tokenizer.from_directory(GOLDEN / "tiny-tied"), chat_template=template)


def test_a_template_that_rewrites_earlier_turns_is_an_error() -> None:
    # The last turn keeps its text, those before lose it: as reasoning is dropped from history.
    template = CASE.replace("{{ m.content }}", "{{ m.content if loop.last else 'w5' }}")
    with pytest.raises(ValueError, match="text up to message 1 .*rewrites earlier turns"):
        encode_dialogue(make_tokenizer(template), FOUR)
    two = encode_dialogue(make_tokenizer(template.replace("'w5'", "m.content")), FOUR[:2])
    assert two.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1]


def test_a_prompt_that_the_turn_does_not_begin_with_is_an_error() -> None:
    template = CASE.replace(
        "{% if add_generation_prompt %}<a>", "{% if add_generation_prompt %}<u>"
    )
    with pytest.raises(ValueError, match="text up to message 1 to begin"):
        encode_dialogue(make_tokenizer(template), FOUR)


def test_dialogues_that_teach_nothing_are_errors() -> None:
    tokenizer = make_tokenizer(CASE)
    with pytest.raises(ValueError, match="expected at least one message of role 'assistant'"):
        encode_dialogue(tokenizer, turns("w10"))
    nothing = make_tokenizer("<u>{% generation %}{% endgeneration %}<u>")
    with pytest.raises(ValueError, match="expected some of the 2 tokens .*got 0"):
        encode_dialogue(nothing, FOUR)
    everything = make_tokenizer("{% generation %}<u>w5<e>{% endgeneration %}")
    with pytest.raises(ValueError, match="expected some of the 3 tokens .*got 3"):
        encode_dialogue(everything, FOUR)


def test_errors_of_the_template_are_errors_of_the_messages() -> None:
    with pytest.raises(ValueError, match="expected a chat template, got None"):
        encode_prompt(make_tokenizer(None), FOUR)
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    with pytest.raises(ValueError, match=r"got roles \['assistant'\]: user first"):
        render(strict, turns("w10", first="assistant"), add_generation_prompt=False)
    with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
        render("{{ messages[0].__class__.__mro__ }}", FOUR, add_generation_prompt=False)
    with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
        render("{% if %}", FOUR, add_generation_prompt=False)
    with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
        render("{{ 'a' + messages[0].content }}", [{"content": None}], add_generation_prompt=False)


def test_a_message_cannot_pass_for_a_mark() -> None:
    forged = [{"role": "user", "parts": [{"text": "a\x00generation\x00b"}]}]
    with pytest.raises(ValueError, match="expected messages without generation markers"):
        render(CASE, forged, add_generation_prompt=False)
    harmless = turns("a\x00b \\u0000")
    text = render("{{ messages[0].content }}", harmless, add_generation_prompt=False)
    assert text == "a\x00b \\u0000"


def test_a_template_cannot_change_the_messages() -> None:
    messages = turns("w10")
    with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
        render("{{ messages.append(1) }}", messages, add_generation_prompt=False)
    assert messages == turns("w10")


@pytest.mark.parametrize("template", [CASE, "<s>" + CASE, "<s><s>" + CASE])
def test_exactly_one_bos_where_the_model_expects_it(template: str) -> None:
    tokenizer = make_tokenizer(template, bos=True)
    dialogue = encode_dialogue(tokenizer, FOUR[:2])
    assert dialogue.ids.tolist() == [0, 1, 10, 3, 2, 11, 3]
    assert dialogue.mask.astype(int).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert encode_prompt(tokenizer, FOUR[:1]) == [0, 1, 10, 3, 2]


def test_no_bos_where_the_model_expects_none() -> None:
    assert encode_prompt(make_tokenizer(CASE), FOUR[:1]) == [1, 10, 3, 2]


def test_a_prompt_begins_the_dialogue_it_continues_to() -> None:
    for row in CHAT:
        if row["name"] != "smollm2" or not row["prompt"] or len(row["messages"]) == 1:
            continue
        tokenizer = golden_tokenizer(row["template"])
        dialogue = encode_dialogue(tokenizer, row["messages"])
        prompt = encode_prompt(tokenizer, row["messages"][:-1])
        assert dialogue.ids[: len(prompt)].tolist() == prompt
        assert not dialogue.mask[len(prompt) - 1] and dialogue.mask[len(prompt)]


def test_date_and_tools_reach_the_template() -> None:
    text = render("{{ strftime_now('%Y-%m-%d') }}", FOUR, add_generation_prompt=False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text)
    tools = [{"name": "add", "note": "a < b & 'c'"}]
    tokenizer = make_tokenizer("{{ tools | tojson }}{{ name }}")
    with_tools = render(
        tokenizer.chat_template, FOUR, add_generation_prompt=False, tools=tools, name="x"
    )
    assert with_tools == '[{"name": "add", "note": "a < b & \'c\'"}]x'


def test_tokens_without_width_belong_where_they_end() -> None:
    """GPT-2's post-processor trims white space off the offsets; the mask stays the same."""
    template = next(row["template"] for row in CHAT if row["name"] == "chatml")
    messages = turns("  hi", "  two  spaces  ")
    exact = golden_tokenizer(template)
    trimmed = golden_tokenizer(template)
    trimmed.backend.post_processor = processors.ByteLevel(trim_offsets=True)
    a, b = (encode_dialogue(tokenizer, messages) for tokenizer in (exact, trimmed))
    assert isinstance(a, Dialogue)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.mask, b.mask)
    learnt = exact.decode(a.ids[a.mask], skip_special=False)
    assert learnt == "  two  spaces  <|im_end|>"
