"""Whether transformers and PEFT read what purepost saves."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from peft import PeftModel  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.utils.logging import (  # pyright: ignore[reportMissingImports]
    disable_progress_bar,
)

from purepost.models import Decoder
from purepost.models.hub import load, save, save_adapter
from purepost.text import Tokenizer, render
from purepost.types import causal_rows
from purepost.weights import adapters, add_lora, merge

disable_progress_bar()  # of loading: there is a bar for every model

IDS = np.random.default_rng(2).integers(3, 288, (1, 40)).astype(np.int32)


def logits(model: Decoder) -> np.ndarray:
    """Our logits of the ids."""
    rows = causal_rows(jnp.asarray(IDS), jnp.array([IDS.shape[1]], jnp.int32))
    return np.asarray(model.unembed(model(rows)[0]))


def with_adapters(model: Decoder) -> Decoder:
    """Adapters on it whose B is not zero, of several ranks."""
    adapted = add_lora(model, rank=4, alpha=8.0, key=jr.key(0), ranks={r"attention\.q": 2})
    return jax.tree.map(
        lambda x, trained: x + 0.05 * jr.normal(jr.key(1), x.shape) if trained else x,
        adapted,
        adapters(adapted),
    )


def reference(directory: Path) -> Any:
    """transformers' model of a directory."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@torch.no_grad()
def reference_logits(directory: Path, adapter: Path | None = None) -> np.ndarray:
    """transformers' logits of the ids."""
    model = reference(directory)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return model(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def check_exports(golden: Path, report: Callable[[str], None]) -> list[str]:
    """Save models in every way and compare transformers' logits with ours, to 1e-4."""
    wrong: list[str] = []

    def compare(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        worst = float(np.abs(ours - theirs).max())
        report(f"saved {name}: max |Δlogit| {worst:.1e}")
        if worst > 1e-4:
            wrong.append(f"saved {name}: logits differ by {worst}")

    with tempfile.TemporaryDirectory() as folder:
        for name in ("tiny-tied", "tiny-llama3"):
            model, tokenizer = load(golden / name)
            plain, merged, split = (Path(folder) / f"{name}-{kind}" for kind in "abc")
            save(model, tokenizer, plain)
            compare(name, logits(model), reference_logits(plain))
            adapted = with_adapters(model)
            save(adapted, tokenizer, merged, max_shard_bytes=50_000)
            compare(f"{name} merged, sharded", logits(merge(adapted)), reference_logits(merged))
            save_adapter(adapted, split, base=str(plain))
            compare(f"{name} adapter", logits(adapted), reference_logits(plain, split))
            wrong += check_tokenizer(plain, tokenizer, golden)
    return wrong


def check_tokenizer(directory: Path, tokenizer: Tokenizer, golden: Path) -> list[str]:
    """Whether transformers' tokenizer of a saved directory gives our ids and dialogues."""
    theirs = AutoTokenizer.from_pretrained(directory)
    texts = json.loads((golden / "tokenizer.json").read_text(encoding="utf-8"))["texts"]
    wrong = [
        f"saved tokenizer: ids of {text!r}"
        for text in texts
        if theirs.encode(text, add_special_tokens=False) != tokenizer.encode(text)
    ]
    names = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    if names != (tokenizer.bos_id, tokenizer.eos_ids[0], tokenizer.pad_id):
        wrong.append(f"saved tokenizer: special ids {names}")
    messages = [{"role": "user", "content": "Hi"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text != render(tokenizer.chat_template, messages, add_generation_prompt=True):
        wrong.append("saved tokenizer: chat template")
    return wrong
