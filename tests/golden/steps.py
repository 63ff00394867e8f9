"""What purepost makes of an adapter by PEFT: its logits, and the adapter after one step of SGD."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from purepost import train
from purepost.algorithms import sft
from purepost.models import Decoder
from purepost.models.hub import load_adapter, save_adapter
from purepost.models.hub.safetensors import read_file
from purepost.types import causal_rows
from purepost.weights import adapter_of, with_adapter

RATE = 0.5  # of SGD


def our_step(
    base: Decoder, path: Path, ids: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Our logits of the tokens [t] with PEFT's adapter, and what we save of it, by PEFT's names,
    after one step on all tokens but the first. Without dropout.
    """
    model = load_adapter(base, path)
    certain = {name: replace(w, dropout=0.0) for name, w in adapter_of(model).items()}
    model = with_adapter(model, certain)
    rows = causal_rows(jnp.asarray(ids[None]), jnp.array([len(ids)], jnp.int32))
    logits = np.asarray(model.unembed(model(rows)[0]))[0]
    algorithm = sft(optax.sgd(RATE))
    state = algorithm.init(jr.key(0), model)
    _, state, _ = next(train(algorithm, state, lambda step: rows, key=jr.key(0), steps=1))
    with tempfile.TemporaryDirectory() as folder:
        trained: Any = state.models
        save_adapter(trained, Path(folder) / "after", base="owner/name")
        tensors = read_file(Path(folder) / "after" / "adapter_model.safetensors")
        return logits, {name: np.array(tensors[name]) for name in tensors}


def differences_of_step(base: Decoder, path: Path, golden: dict[str, np.ndarray]) -> list[str]:
    """Where our logits, or our adapter after a step, are further than 1e-5 from PEFT's: of the
    largest entry, where that is above 1.
    """
    logits, after = our_step(base, path, golden["ids"])
    theirs = {name.removeprefix("after/"): x for name, x in golden.items() if "after/" in name}
    if theirs.keys() != after.keys():
        return [f"names differ: {sorted(theirs.keys() ^ after.keys())}"]
    pairs = {"logits": (logits, golden["logits"]), **{n: (after[n], theirs[n]) for n in after}}
    worst = {n: float(np.abs(a - b).max() / max(1, np.abs(b).max())) for n, (a, b) in pairs.items()}
    return [f"{name} differs by {error:.1e}" for name, error in worst.items() if error > 1e-5]
