"""Attention maps and hidden states that transformers gives tiny checkpoints of some families, of
one row longer than their window. Run it with Python packages transformers and torch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
LENGTH, FAMILIES = 20, {"qwen2": (0, 1), "gemma2": (1, 2), "gemma3_text": (0, 2)}  # and layers


def main() -> None:
    """Write traces.npz: the maps of the layers, and the stream after them (none is the last)."""
    found: dict[str, Any] = {"ids": np.random.default_rng(11).integers(3, 288, (1, LENGTH))}
    for family, layers in FAMILIES.items():
        model = AutoModelForCausalLM.from_pretrained(HERE / family, attn_implementation="eager")
        with torch.no_grad():
            out = model.float().eval()(
                torch.tensor(found["ids"]), output_attentions=True, output_hidden_states=True
            )
        for i in layers:
            found[f"{family}.maps.{i}"] = out.attentions[i].numpy()
            if i + 1 < len(out.attentions):  # transformers norms what the last layer gives
                found[f"{family}.state.{i}"] = out.hidden_states[i + 1].numpy()
    np.savez_compressed(HERE / "traces.npz", **found)


if __name__ == "__main__":
    main()
