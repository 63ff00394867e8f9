"""Tiny random checkpoints of models that read images as well as text, with the logits that
transformers gives text alone. make.py calls it; alone it makes these files again.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from families import FAMILIES, SHARED, TOKENIZER, random_weights
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForImageTextToText,
)

HERE = Path(__file__).parent
LENGTHS = (48, 21)  # tokens; the window is 12
POSITIONS = np.array([[0, 11, 12, 13, 30, 47], [0, 1, 5, 12, 13, 20]])

_EYES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
# The family of the text model, and what of the vision model differs from the above.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"model_type": "siglip_vision_model", "image_size": 8}),
    "gemma4": (
        "gemma4_text_experts",
        {"num_key_value_heads": 2, "head_dim": 4, "position_embedding_size": 4},
    ),
    "mistral3": ("mistral", {"model_type": "pixtral", "image_size": 8, "head_dim": 4}),
}


@torch.no_grad()
def multimodal_directory(path: Path, name: str, tokenizer: Path) -> dict[str, Any]:
    """Write a tiny checkpoint; the logits of two rows of uneven lengths."""
    family, eyes = MODELS[name]
    text = {"model_type": family, **SHARED, **FAMILIES[family]}
    more = {"mm_tokens_per_image": 1} if name == "gemma3" else {}
    config = AutoConfig.for_model(
        name,
        text_config=text,
        vision_config={**_EYES, **eyes},
        tie_word_embeddings=text.get("tie_word_embeddings", True),
        **more,
    )
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config).eval()
    random_weights(model)
    model.save_pretrained(path)
    for file in TOKENIZER:
        shutil.copyfile(tokenizer / file, path / file)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForImageTextToText.from_pretrained(path, **options).eval()
    ids = np.random.default_rng(7).integers(3, 288, (2, LENGTHS[0])).astype(np.int32)
    real = np.arange(LENGTHS[0]) < np.array(LENGTHS)[:, None]
    out = model(torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(real).long())
    logits = np.stack([x[at] for x, at in zip(out.logits.numpy(), POSITIONS, strict=True)])
    golden = {"ids": ids, "lengths": np.array(LENGTHS, np.int32), "logits": logits}
    return {**golden, "positions": POSITIONS.astype(np.int32)}


def make_multimodal(target: Path) -> None:
    """Write the checkpoints, each with its golden numbers beside it; tiny-tied is there already."""
    for name in MODELS:
        path = target / name
        shutil.rmtree(path, ignore_errors=True)
        golden = multimodal_directory(path, name, target / "tiny-tied")
        np.savez_compressed(target / f"{name}.npz", **golden)


if __name__ == "__main__":
    make_multimodal(HERE)
