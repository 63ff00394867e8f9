"""Each family's chat format against transformers' (tests/golden/chats.py), and its masks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from purepost.text import Tokenizer, encode_dialogue, encode_prompt, render, rewrites_history

GOLDEN = Path(__file__).parents[1] / "golden"
CHATS = json.loads((GOLDEN / "chats.json").read_text(encoding="utf-8"))
TEMPLATES, DIALOGUES, TOOLS = CHATS["templates"], CHATS["dialogues"], CHATS["tools"]


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    return Tokenizer.from_directory(GOLDEN / "tiny-tied")


def history(family: str, dialogue: str) -> int | None:
    tools = TOOLS if dialogue in ("tools", "two calls") else None
    return rewrites_history(
        TEMPLATES[family], DIALOGUES[dialogue], tools=tools, **CHATS["variables"]
    )


@pytest.mark.parametrize("family", TEMPLATES)
def test_texts_equal_transformers(family: str) -> None:
    texts = 0
    for row in CHATS["rows"][family]:
        options = {k: row[k] for k in ("enable_thinking",) if k in row}

        def written(row: dict[str, Any] = row, options: dict[str, Any] = options) -> str:
            return render(
                TEMPLATES[family],
                DIALOGUES[row["dialogue"]],
                add_generation_prompt=row.get("add_generation_prompt", False),
                continue_final=row.get("continue_final_message", False),
                tools=TOOLS if row["tools"] else None,
                **CHATS["variables"],
                **options,
            )

        if row["text"] is None:
            with pytest.raises(ValueError):
                written()
        else:
            texts += 1
            assert written() == row["text"], row
    assert texts >= 15


def test_the_formats_are_the_published_ones() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = {
        "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>",
        "mistral": "<s>[INST] a[/INST] b</s>",
        "qwen2.5": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
        "qwen3": "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n",
        "gemma2": "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
        "gemma4": "<s><|turn>user\na<turn|>\n<|turn>model\nb<turn|>\n",
        "deepseek-r1": "<s><｜User｜>a<｜Assistant｜>b<｜end▁of▁sentence｜>",
    }
    for family, text in expected.items():
        got = render(
            TEMPLATES[family], turns, add_generation_prompt=False, bos_token="<s>", eos_token="</s>"
        )
        assert got == text


def test_marked_masks_equal_transformers(base: Tokenizer) -> None:
    tokenizer = replace(base, chat_template=TEMPLATES["qwen3-marked"])
    for row in CHATS["marked"]:
        tools = TOOLS if row["dialogue"] in ("tools", "two calls") else None
        dialogue = encode_dialogue(tokenizer, DIALOGUES[row["dialogue"]], tools=tools)
        assert dialogue.ids.tolist() == row["ids"]
        assert dialogue.mask.astype(int).tolist() == row["mask"]


@pytest.mark.parametrize(
    ("family", "dialogue", "turn"),
    [
        ("llama3", "turns", None),
        ("qwen2.5", "two calls", None),
        ("gemma3", "turns", None),
        ("gemma4", "turns", None),
        ("gemma4", "thinking", 1),
        ("qwen3-marked", "thinking", None),
        ("qwen3", "turn", None),
        ("qwen3", "thinking", 1),  # the reasoning of the first answer goes
        ("qwen3", "two calls", None),  # within one question it stays
        ("deepseek-r1", "turn", 1),  # the prompt opens reasoning that the answer then lacks
        ("mistral", "turns", 2),  # the system prompt moves to the last question
        ("mistral", "turn", None),
    ],
)
def test_rewritten_history_is_found(family: str, dialogue: str, turn: int | None) -> None:
    assert history(family, dialogue) == turn


def learnt(tokenizer: Tokenizer, family: str, messages: Any, **options: Any) -> str:
    tokenizer = replace(tokenizer, chat_template=TEMPLATES[family])
    dialogue = encode_dialogue(tokenizer, messages, **options)
    return tokenizer.decode(dialogue.ids[dialogue.mask], skip_special=False)


def test_what_is_learnt_of_tools_is_what_the_assistant_wrote(base: Tokenizer) -> None:
    messages = DIALOGUES["tools"]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "ü < 3"}}\n</tool_call>'
    end = "<|im_end|>"
    everything = learnt(base, "qwen2.5", messages, tools=TOOLS)
    assert everything == call + end + "It is 5." + end + "Yes." + end
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m["content"]]
    assert learnt(base, "qwen2.5", messages, tools=TOOLS, turns=answers) == (
        "It is 5." + end + "Yes." + end
    )
    assert learnt(base, "qwen3-marked", messages, tools=TOOLS, turns=[2]) == "\n" + call + end


def test_thinking_is_learnt_where_it_is_written(base: Tokenizer) -> None:
    messages = DIALOGUES["thinking"]
    last = "<think>\ntwo and two\n</think>\n\n4<|im_end|>"
    with pytest.raises(ValueError, match="text up to message 1 .* turns=.i."):
        learnt(base, "qwen3", messages)
    assert learnt(base, "qwen3", messages, turns=[3]) == last
    first = "<think>\none and\n\none\n</think>\n\n2<|im_end|>"
    assert learnt(base, "qwen3", messages[:2], turns=[1]) == first
    assert learnt(base, "qwen3-marked", messages) == first + last
    with pytest.raises(ValueError, match="text up to message 3 to begin"):
        learnt(base, "deepseek-r1", messages, turns=[3])


def test_turns_name_assistant_messages(base: Tokenizer) -> None:
    for turns in ([0], [], [9]):
        with pytest.raises(ValueError, match=r"expected turns among .*\[1, 3\], got"):
            learnt(base, "qwen2.5", DIALOGUES["thinking"], turns=turns)
    tokenizer = replace(base, chat_template="a{% generation %}b{% endgeneration %}")
    with pytest.raises(ValueError, match="expected one marked text for each of 2"):
        encode_dialogue(tokenizer, DIALOGUES["thinking"], turns=[1])


def test_a_prompt_can_go_on_with_the_last_message(base: Tokenizer) -> None:
    tokenizer = replace(base, chat_template=TEMPLATES["qwen2.5"])
    started = [*DIALOGUES["turn"][:1], {"role": "assistant", "content": "Hello, I"}]
    prompt = encode_prompt(tokenizer, DIALOGUES["turn"][:1])
    assert encode_prompt(tokenizer, started, continue_final=True) == (
        prompt + tokenizer.encode("Hello, I")
    )
    with pytest.raises(ValueError, match="got both"):
        render("", started, add_generation_prompt=True, continue_final=True)
    with pytest.raises(ValueError, match="whose content is a text, got list"):
        render("", DIALOGUES["parts"][:1], add_generation_prompt=False, continue_final=True)
    with pytest.raises(ValueError, match="to write out the last message"):
        render("nothing", started, add_generation_prompt=False, continue_final=True)


def test_variables_reach_the_template(base: Tokenizer) -> None:
    tokenizer = replace(base, chat_template=TEMPLATES["qwen3"])
    quiet = encode_prompt(tokenizer, DIALOGUES["question"], variables={"enable_thinking": False})
    assert tokenizer.decode(quiet, skip_special=False).endswith("<think>\n\n</think>\n\n")
