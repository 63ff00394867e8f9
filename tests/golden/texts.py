"""Whether purepost's texts and ids are those of the libraries installed beside it: TRL's copies of
the families' chat templates, sentencepiece's ids, tokenizers that transformers reads."""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chats import DIALOGUES, TOOLS, VARIABLES, rows
from tables import TEXTS
from tokenizers import AddedToken
from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

from purepost.text import Tokenizer, render

HERE = Path(__file__).parent
Report = Callable[[str], None]


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


def check_templates(report: Report) -> list[str]:
    """Compare the two on the templates that come with TRL, if that is installed."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        report("trl is not installed: its chat templates are not compared")
        return []
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-tied")
    wrong: list[str] = []
    paths = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    texts = 0
    for path in paths:
        template = path.read_text(encoding="utf-8")
        for row in rows(tokenizer, template):
            texts += row["text"] is not None
            if ours(template, row) != row["text"]:
                wrong.append(f"{path.name}: { ({k: v for k, v in row.items() if k != 'text'}) }")
    report(f"chat templates: {len(paths)} of TRL's, {texts} texts, {len(wrong)} differ")
    return wrong


def check_sentencepiece(report: Report) -> list[str]:
    """Compare the stored ids with sentencepiece's, if that is installed."""
    if importlib.util.find_spec("sentencepiece") is None:
        report("sentencepiece is not installed: its ids are not compared")
        return []
    from spm import spm_table

    stored = json.loads((HERE / "spm.json").read_text(encoding="utf-8"))
    return [] if stored == spm_table() else ["spm.json holds other ids"]


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
