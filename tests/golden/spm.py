"""Small SentencePiece models of every kind, and the ids that sentencepiece gives by them.

The models are made once and kept (`python tests/golden/spm.py` makes those that are missing); the
ids are compared with sentencepiece's by `make parity`.
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece  # pyright: ignore[reportMissingImports]
from tables import TEXTS

HERE = Path(__file__).parent
FOLDER = HERE / "spm"
MORE = [
    "a<sep>b <sep> c<sep>",
    "<sep>first",
    "<turn>user\nHi there<end>\n<turn>model\n",
    "▁written ▁▁ already",
    "  two before, two after  ",
    " ",
    "unseen: ∮ ⌘ 漢 \U0001f9ff",
]
LLAMA = {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
SYMBOLS = ["<sep>", "<turn>", "<end>"]
KINDS: dict[str, dict[str, Any]] = {
    "bpe": LLAMA,
    "bpe-symbols": {**LLAMA, "user_defined_symbols": SYMBOLS},
    # As Gemma's: no space before, runs of spaces and lines as symbols, other special ids.
    "bpe-bare": {
        **LLAMA,
        "add_dummy_prefix": False,
        "user_defined_symbols": [*SYMBOLS, "\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
    },
    "unigram": {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": SYMBOLS},
    # Without bytes there are unknown characters; some characters are replaced.
    "unigram-unknown": {"model_type": "unigram", "normalization_rule_tsv": "rules.tsv"},
}
# é and e´ → e, ½ → 1/2, tab → space, ß → ss, zero-width space → nothing
RULES = "E9\t65\n65 301\t65\nBD\t31 2F 32\n9\t20\nDF\t73 73\n200B\t\n"


def train(name: str) -> bytes:
    """A model's file; paths in it are relative."""
    options = dict(KINDS[name])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if "normalization_rule_tsv" in options:
            Path("rules.tsv").write_text(RULES, encoding="utf-8")
        else:
            options["normalization_rule_name"] = "identity"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS[1:20] * 20),
            model_prefix=name,
            vocab_size=560 if options.get("byte_fallback") else 260,
            hard_vocab_limit=False,
            character_coverage=0.99,
            num_threads=1,
            minloglevel=2,
            **options,
        )
        return Path(f"{name}.model").read_bytes()


def spm_table() -> dict[str, Any]:
    """The ids of the texts by every model, and the texts of the ids."""
    out: dict[str, Any] = {"texts": TEXTS + MORE, "models": {}}
    for name in KINDS:
        model = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / f"{name}.model"))
        ids = [model.encode(text) for text in out["texts"]]
        out["models"][name] = {
            "ids": ids,
            "decoded": [model.decode(row) for row in ids],
            "special": [model.bos_id(), model.eos_id(), model.pad_id()],
        }
    return out


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for kind in KINDS:
        if not (FOLDER / f"{kind}.model").is_file():
            (FOLDER / f"{kind}.model").write_bytes(train(kind))
    table = json.dumps(spm_table(), ensure_ascii=False)
    (HERE / "spm.json").write_text(table + "\n", encoding="utf-8")
