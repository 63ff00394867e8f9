"""A tiny sequence classifier, with the scores that transformers gives it. make.py calls it; alone
it makes these files again.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

HERE = Path(__file__).parent
LENGTHS = (1, 5, 9, 12)


@torch.no_grad()
def classifier_directory(path: Path) -> dict[str, Any]:
    """Write a tiny Llama with three scores; those of rows of uneven lengths, padded with 0."""
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        num_labels=3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(path)
    ids = np.random.default_rng(5).integers(3, 288, (4, max(LENGTHS))).astype(np.int32)
    real = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.where(real, ids, 0).astype(np.int32)
    return {"ids": ids, "lengths": np.array(LENGTHS, np.int32), "scores": scores(path, ids)}


@torch.no_grad()
def scores(path: Path, ids: np.ndarray) -> np.ndarray:
    """The scores that transformers gives rows padded with 0 by the classifier in a directory."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(path, **options).eval()
    mask = torch.tensor(ids != 0).long()
    return model(torch.tensor(ids, dtype=torch.long), attention_mask=mask).logits.numpy()


def check_classifier(golden: Path, report: Callable[[str], None]) -> list[str]:
    """Save the classifier by purepost; the scores that transformers gives it then, to 1e-5."""
    from purepost.models.hub import load_classifier, save_classifier

    stored = np.load(golden / "classifier.npz")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(golden / "classifier", source)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(golden / "tiny-tied" / name, source / name)
        save_classifier(*load_classifier(source), Path(folder) / "saved")
        found = scores(Path(folder) / "saved", stored["ids"])
    worst = float(np.abs(found - stored["scores"]).max())
    report(f"saved classifier: max |Δscore| {worst:.1e}")
    return [f"saved classifier: scores differ by {worst}"] if worst > 1e-5 else []


def make(target: Path) -> None:
    """Write both."""
    np.savez_compressed(target / "classifier.npz", **classifier_directory(target / "classifier"))


if __name__ == "__main__":
    make(HERE)
