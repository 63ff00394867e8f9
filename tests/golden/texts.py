"""Whether purepost's texts and ids are other libraries': transformers' texts by the chat templates
that come with TRL, sentencepiece's ids, and those of tokenizers that transformers reads.
"""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chats import DIALOGUES, TEMPLATES, TOOLS, VARIABLES, rows
from spm import spm_table
from tables import TEXTS
from tokenizers import AddedToken
from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

from purepost.text import Tokenizer, render

HERE = Path(__file__).parent
Report = Callable[[str], None]

# Family → the templates in its formats: ours (chats.py), and TRL's.
_GEMMA = (("gemma2",), ("gemma", "gemma_training"))
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (("llama3", "llama3.1"), ("llama3", "llama3_training", "llama3_1", "llama3_2")),
    "mistral": (("mistral",), ()),
    "qwen2": (
        ("qwen2.5", "deepseek-r1"),
        ("qwen2_5", "qwen2_5_training", "deepseek_r1_distill", "deepseek_r1_distill_training"),
    ),
    "qwen3": (("qwen3", "qwen3-marked"), ("qwen3", "qwen3_training")),
    "qwen3_moe": (
        ("qwen3",),
        ("qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training"),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": (("gemma3",), ("gemma3", "gemma3_training")),
    "gemma4_text": (
        ("gemma4",),
        ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    ),
}


def check_texts(report: Report) -> list[str]:
    """All comparisons; what differs."""
    return check_templates(report) + check_sentencepiece(report) + check_saved(report)


def ours(template: str, row: dict[str, Any]) -> str | None:
    """Our text of a row, None where we refuse."""
    thinking = {k: row[k] for k in ("enable_thinking",) if k in row}
    try:
        return render(
            template,
            DIALOGUES[row["dialogue"]],
            add_generation_prompt=row.get("add_generation_prompt", False),
            continue_final=row.get("continue_final_message", False),
            tools=TOOLS if row["tools"] else None,
            **VARIABLES,
            **thinking,
        )
    except ValueError:
        return None


def trl_templates() -> dict[str, str]:
    """The templates that come with TRL, by name."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("expected trl, whose chat templates are compared, found none")
    paths = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def text_differences(templates: dict[str, str]) -> list[str]:
    """The dialogues that transformers writes otherwise than we by some of the templates."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-tied")
    return [
        f"{name}: { ({k: v for k, v in row.items() if k != 'text'}) }"
        for name, template in templates.items()
        for row in rows(tokenizer, template)
        if ours(template, row) != row["text"]
    ]


def family_differences(name: str) -> list[str]:
    """Of the templates in one family's formats."""
    own, of_trl = FORMATS[name]
    theirs = trl_templates()
    return text_differences(
        {n: TEMPLATES[n] for n in own} | {f"trl's {n}": theirs[n] for n in of_trl}
    )


def check_templates(report: Report) -> list[str]:
    """Compare the two on the templates that come with TRL, of our families and others."""
    templates = trl_templates()
    wrong = text_differences(templates)
    report(f"chat templates: {len(templates)} of TRL's, {len(wrong)} texts differ")
    return wrong


def check_sentencepiece(report: Report) -> list[str]:
    """Compare the stored ids with sentencepiece's."""
    stored = json.loads((HERE / "spm.json").read_text(encoding="utf-8"))
    wrong = [] if stored == spm_table() else ["spm.json holds other ids"]
    report(f"sentencepiece: {len(stored['models'])} models, {len(wrong)} differ")
    return wrong


def check_saved(report: Report) -> list[str]:
    """Let transformers read tokenizers that purepost saves, flags of added tokens included."""
    wrong: list[str] = []
    models = sorted((HERE / "spm").glob("*.model"))
    for name in ("tiny-tied", *(path.name for path in models)):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            if name == "tiny-tied":
                tokenizer = with_flags(Tokenizer.from_directory(HERE / name))
            else:
                shutil.copy(HERE / "spm" / name, directory / "tokenizer.model")
                tokenizer = Tokenizer.from_directory(directory)
                (directory / "tokenizer.model").unlink()
            tokenizer.save(directory)
            theirs = AutoTokenizer.from_pretrained(directory)
        wrong += [f"saved {name}: {what}" for what in unlike(tokenizer, theirs)]
    report(f"tokenizers read by transformers: {1 + len(models)}, {len(wrong)} differences")
    return wrong


def with_flags(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with added tokens of every kind."""
    for i in range(16):
        strip = {"lstrip": bool(i & 1), "rstrip": bool(i & 2)}
        token = AddedToken(f"<Tok{i}>", normalized=bool(i & 4), special=bool(i & 8), **strip)
        tokenizer.backend.add_tokens([token])
    end = tokenizer.backend.token_to_id("<Tok11>")
    return replace(tokenizer, eos_ids=(end, *tokenizer.eos_ids))


def unlike(tokenizer: Tokenizer, theirs: Any) -> list[str]:
    """What another library's tokenizer does otherwise."""
    added = tokenizer.backend.get_added_tokens_decoder()
    texts = [*TEXTS, *(f"a {token.content} b{token.content}c" for token in added.values())]
    wrong = [
        f"ids of {text!r}"
        for text in texts
        if theirs.encode(text) != tokenizer.encode(text, add_special=True)
    ]
    for i, token in added.items():
        other = theirs.added_tokens_decoder.get(i)
        if other is None or repr(other) != repr(token):
            wrong.append(f"token {i} is {other}, not {token}")
    ids = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    if ids != (tokenizer.bos_id, tokenizer.eos_ids[0], tokenizer.pad_id):
        wrong.append(f"special ids are {ids}")
    return wrong
