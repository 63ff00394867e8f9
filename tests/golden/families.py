"""Tiny random checkpoints of every family, with the logits that transformers gives them, and its
RoPE frequencies. make.py calls it; alone it makes these files again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
)
from transformers.modeling_rope_utils import (  # pyright: ignore[reportMissingImports]
    ROPE_INIT_FUNCTIONS,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # pyright: ignore[reportMissingImports]
    load_balancing_loss_func,
)

HERE = Path(__file__).parent
LENGTHS = (256, 97)  # tokens; the first row reaches the last position
POSITIONS = np.array([[0, 1, 11, 12, 13, 40, 127, 128, 129, 254, 255], [*range(9), 50, 96]])
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SHARED = {
    "vocab_size": 288,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FOUR = {"num_hidden_layers": 4}

# What each family has of its own, at sizes where it shows; a variant names its family.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**YARN, "rope_theta": 500.0}, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 12, "tie_word_embeddings": False},
    "qwen2": {
        "head_dim": None,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    },
    "qwen3": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0},
    },
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen3_moe_dense": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {
        **FOUR,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **FOUR,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "layer_types": [f"{x}_attention" for x in ("sliding", "sliding", "full", "sliding")],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    # Five stacks: own keys and values with a window and without, then shared ones of both kinds.
    "gemma4_text": {
        "num_hidden_layers": 7,
        "layer_types": [f"{x}_attention" for x in ("sliding sliding full " * 3).split()[:6]]
        + ["full_attention"],
        "num_kv_shared_layers": 3,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 288,
        "sliding_window": 12,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "partial_rotary_factor": 0.5},
                "rope_theta": 3000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "gemma4_text_experts": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": [f"{x}_attention" for x in ("sliding", "full", "full")],
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "sliding_window": 12,
    },
}

# RoPE parameters, positions of the model, and of the sequence.
ROPES: list[tuple[dict[str, Any], int, int]] = [
    ({"rope_type": "linear", "factor": 4.0}, 512, 512),
    ({"rope_type": "dynamic", "factor": 4.0}, 512, 512),
    ({"rope_type": "dynamic", "factor": 4.0}, 512, 1500),
    (
        {
            **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
        *(2048, 2048),
    ),
    (YARN, 256, 256),
    ({**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}, 256, 256),
    ({**YARN, "attention_factor": 1.25}, 256, 256),
    ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, 256, 256),
    ({**YARN, "factor": 1.0}, 64, 64),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}, 256, 256),
]


def random_weights(model: Any) -> None:
    """Values that let everything show: scales away from 1, biases, matrices of size 1/√in."""
    torch.manual_seed(0)
    gemma = "Gemma" in type(model).__name__
    offset = gemma and "Gemma4" not in type(model).__name__
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1 and "norm" in name:
                parameter.uniform_(-0.5, 0.5) if offset else parameter.uniform_(0.5, 1.5)
                if "Gemma4" in type(model).__name__ and ("_norm" in name or "post" in name):
                    parameter.mul_(0.5)  # nothing else makes scores and branches smaller
            elif parameter.ndim == 1:
                parameter.normal_(0, 8.0 if name.endswith("router.scale") else 0.5)
            else:
                embed = 0.2 if gemma else 1.0
                parameter.normal_(0, embed if "embed" in name else parameter.shape[-1] ** -0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)


@torch.no_grad()
def family_directory(path: Path, name: str, tokenizer: Path) -> dict[str, Any]:
    """Write a tiny checkpoint; the logits of two rows of uneven lengths."""
    fields = {k: v for k, v in {**SHARED, **FAMILIES[name]}.items() if v is not None}
    model_type = fields.pop("model_type", name)
    config = AutoConfig.for_model(model_type, **fields)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    random_weights(model)
    model.save_pretrained(path)
    for file in TOKENIZER:
        shutil.copyfile(tokenizer / file, path / file)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    rng = np.random.default_rng(1)
    ids = rng.integers(0, SHARED["vocab_size"], (2, LENGTHS[0])).astype(np.int32)
    mask = np.arange(LENGTHS[0]) < np.array(LENGTHS)[:, None]
    tokens, real = torch.tensor(ids, dtype=torch.long), torch.tensor(mask).long()
    more = {"output_router_logits": True} if model_type == "qwen3_moe" else {}
    routers = watch_routers(model)
    out = model(tokens, attention_mask=real, **more)
    logits = np.stack([x[at] for x, at in zip(out.logits.numpy(), POSITIONS, strict=True)])
    golden = {"ids": ids, "lengths": np.array(LENGTHS, np.int32), "logits": logits}
    golden["positions"] = POSITIONS.astype(np.int32)
    if more:
        golden["load_balancing_loss"] = out.aux_loss.numpy()
    if routers:
        experts, chosen = model.config.num_experts, model.config.top_k_experts
        loss = load_balancing_loss_func(tuple(routers), experts, chosen, real)
        golden["load_balancing_loss"] = loss.numpy()
    return golden


def watch_routers(model: Any) -> list[torch.Tensor]:
    """Where a Gemma 4's routers put the logarithms of their probabilities when it runs: it has no
    loss of its own for them.
    """
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "Gemma4TextRouter":
            module.register_forward_hook(lambda module, given, out: seen.append(out[0].log()))
    return seen


def rope_table() -> list[dict[str, Any]]:
    """Frequencies and factors as transformers computes them."""
    rows = []
    for parameters, positions, length in ROPES:
        config = LlamaConfig(
            head_dim=32,
            max_position_embeddings=positions,
            rope_parameters={**parameters, "rope_theta": 700.0},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            config, torch.device("cpu"), seq_len=length
        )
        row = {"parameters": {**parameters, "rope_theta": 700.0}, "positions": positions}
        row |= {"length": length, "factor": factor}
        rows.append({**row, "frequencies": [float(f"{x:.8g}") for x in frequencies]})
    return rows


def make_families(target: Path) -> None:
    """Write the checkpoints, each with its golden numbers beside it; tiny-tied is there already."""
    for name in FAMILIES:
        path = target / name
        shutil.rmtree(path, ignore_errors=True)
        golden = family_directory(path, name, target / "tiny-tied")
        np.savez_compressed(target / f"{name}.npz", **golden)
    text = json.dumps(rope_table(), indent=0) + "\n"
    (target / "rope.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make_families(HERE)
