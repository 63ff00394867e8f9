"""PEFT's adapters in training: the logits they give, and what one step of SGD makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from peft import (  # pyright: ignore[reportMissingImports]
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from steps import RATE, differences_of_step
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

from purepost.models.hub import load

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": [*MODULES, "embed_tokens"], "lora_dropout": 0.05},
    "dora": {"target_modules": MODULES, "use_dora": True},
}
IDS = np.random.default_rng(5).integers(3, 288, 40).astype(np.int32)


def make_adapter(name: str, path: Path, base: Path) -> dict[str, Any]:
    """Write an adapter of random numbers by PEFT; the model's logits with it, and the adapter after
    one step on all tokens but the first.
    """
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(base, **options)
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **ADAPTERS[name])
    model = get_peft_model(plain, config).eval()
    torch.manual_seed(2)
    trained = [p for n, p in model.named_parameters() if "lora_" in n]
    with torch.no_grad():
        for parameter in trained:
            if parameter.ndim == 1:  # magnitudes
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    model.peft_config["default"].base_model_name_or_path = base.name
    model.save_pretrained(path, save_embedding_layers=False)
    (path / "README.md").unlink()
    written = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    written["target_modules"].sort()  # PEFT keeps a set
    text = json.dumps(written, ensure_ascii=False, indent=0) + "\n"
    (path / "adapter_config.json").write_text(text, encoding="utf-8")
    ids = torch.tensor(IDS[None], dtype=torch.long)
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.optim.SGD(trained, lr=RATE).step()
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    after = {f"after/{name}": x.detach().numpy() for name, x in state.items()}
    return {"ids": IDS, "logits": out.logits[0].detach().numpy(), **after}


def make(target: Path, base: Path) -> None:
    """Write every adapter and what becomes of it."""
    for name in ADAPTERS:
        np.savez_compressed(target / f"{name}.npz", **make_adapter(name, target / name, base))


def check_steps(golden: Path, made: Path, report: Callable[[str], None]) -> list[str]:
    """Where our step is further than 1e-5 from the one that PEFT has just made."""
    base, wrong = load(golden / "tiny-llama3").model, []
    for name in ADAPTERS:
        found = differences_of_step(base, made / name, dict(np.load(made / f"{name}.npz")))
        report(f"a training step of {name}: {len(found)} tensors further than 1e-5 from PEFT's")
        wrong += [f"{name}: {line}" for line in found]
    return wrong
