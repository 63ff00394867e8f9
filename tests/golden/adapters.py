"""Whether PEFT reads the adapters that purepost saves, and purepost what PEFT saves of them."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from exports import reference
from peft import PeftModel  # pyright: ignore[reportMissingImports]

from purepost.models import Decoder
from purepost.models.hub import load_adapter, save_adapter
from purepost.types import causal_rows
from purepost.weights import ALL_LINEAR, adapters, add_lora

IDS = np.random.default_rng(4).integers(3, 288, (1, 40)).astype(np.int32)
RANKS = {r"attention\.[kv]$": 2, r"mlp\.down$": 3}
ALPHAS = {r"attention\.o$": 3.0}


@torch.no_grad()
def adapter_difference(base: Decoder, path: Path) -> float:
    """The largest difference of logits: of an adapter of uneven ranks and scales on the model of a
    directory, PEFT's from ours; and ours once PEFT has saved it again.
    """
    rows = causal_rows(jnp.asarray(IDS), jnp.array([IDS.shape[1]], jnp.int32))
    where, ranks = ALL_LINEAR, RANKS
    if base.config.dense_layers:  # PEFT takes MLPs for experts
        where, ranks = r"attention\.[qkvo]$", {r"attention\.[kv]$": 2}
    if base.config.side_expert_size:  # PEFT takes experts for no matrices
        where = r"layers\.(\d+\.)?(attention\.[qkvo]|mlp\.(gate|up|down))$"
    model = add_lora(
        base, where=where, rank=4, alpha=8.0, key=jr.key(0), ranks=ranks, alphas=ALPHAS
    )
    model = jax.tree.map(
        lambda x, trained: x + 0.1 * jr.normal(jr.key(1), x.shape) if trained else x,
        model,
        adapters(model),
    )
    ours = np.asarray(model.unembed(model(rows)[0]))
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(model, Path(folder) / "adapter", base=str(path))
        theirs = PeftModel.from_pretrained(reference(path), Path(folder) / "adapter").eval()
        found = [theirs(torch.tensor(IDS, dtype=torch.long)).logits.numpy()]
        config = base.config  # PEFT saves experts in the place of MLPs as one parameter
        if not config.num_experts or config.dense_layers or config.side_expert_size:
            theirs.save_pretrained(Path(folder) / "again")
            again = load_adapter(base, Path(folder) / "again")
            found.append(np.asarray(again.unembed(again(rows)[0])))
    return max(float(np.abs(logits - ours).max()) for logits in found)
