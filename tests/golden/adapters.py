"""Whether PEFT reads the adapters that purepost saves, in every family: its logits against ours."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from peft import PeftModel  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

from purepost.models.hub import load, load_adapter, save_adapter
from purepost.models.hub.families import FAMILIES
from purepost.types import causal_rows
from purepost.weights import adapters, add_lora

IDS = np.random.default_rng(4).integers(3, 288, (1, 40)).astype(np.int32)
RANKS = {r"attention\.[kv]$": 2, r"mlp\.down$": 3}
ALPHAS = {r"attention\.o$": 3.0}


@torch.no_grad()
def check_adapters(golden: Path, report: Callable[[str], None]) -> list[str]:
    """Save an adapter of uneven ranks and scales for each family's golden model; logits to 1e-4."""
    wrong: list[str] = []
    rows = causal_rows(jnp.asarray(IDS), jnp.array([IDS.shape[1]], jnp.int32))
    for family in FAMILIES:
        base, _ = load(golden / family)
        model = add_lora(base, rank=4, alpha=8.0, key=jr.key(0), ranks=RANKS, alphas=ALPHAS)
        model = jax.tree.map(
            lambda x, trained: x + 0.1 * jr.normal(jr.key(1), x.shape) if trained else x,
            model,
            adapters(model),
        )
        ours = np.asarray(model.unembed(model(rows)[0]))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "adapter"
            save_adapter(model, path, base=str(golden / family))
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            plain = AutoModelForCausalLM.from_pretrained(golden / family, **options)
            theirs = PeftModel.from_pretrained(plain, path).eval()
            logits = theirs(torch.tensor(IDS, dtype=torch.long)).logits.numpy()
            if family != "qwen3_moe":  # whose experts PEFT saves as one parameter
                theirs.save_pretrained(Path(folder) / "again")
                again = load_adapter(base, Path(folder) / "again")
                back = float(np.abs(np.asarray(again.unembed(again(rows)[0])) - ours).max())
                if back > 1e-5:
                    wrong.append(f"adapter of a {family} by way of PEFT: logits differ by {back}")
        worst = float(np.abs(ours - logits).max())
        report(f"saved adapter of a {family}: max |Δlogit| {worst:.1e}")
        if worst > 1e-4:
            wrong.append(f"saved adapter of a {family}: logits differ by {worst}")
    return wrong
