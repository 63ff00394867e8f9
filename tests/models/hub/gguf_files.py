"""GGUF files as llama.cpp's converter makes them of Hugging Face checkpoints, by the format's own
writer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

GOLDEN = Path(__file__).parents[2] / "golden"
TABLE = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
TOKENS = sorted(TABLE["vocab"], key=TABLE["vocab"].get)[:288]

# Of each layer; a Gemma 2, 3 or 4 has the norms of the second table, in whose words
# `post_attention_layernorm` is another norm.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
}


def interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """A Llama's query or key rows in llama.cpp's order: of each head, 0, k/2, 1, k/2 + 1, …"""
    half = value.shape[0] // heads // 2
    order = [h * 2 * half + i + s * half for h in range(heads) for i in range(half) for s in (0, 1)]
    return value[order]


def stored_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A checkpoint's tensors (float32) as the converter stores them, by its names."""
    architecture = ARCHITECTURES[config["model_type"]]
    names = NAMES | (FOUR_NORMS if architecture in ("gemma2", "gemma3", "gemma4") else {})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    experts: dict[str, dict[int, np.ndarray]] = {}
    out: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if name.endswith(".layer_scalar"):
            out[f"blk.{name.split('.')[2]}.layer_output_scale.weight"] = value
            continue
        stem, kind = name.rsplit(".", 1)
        if architecture == "llama" and stem.split(".")[-1] in heads:
            value = interleaved(value, heads[stem.split(".")[-1]])
        if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if not stem.startswith("model.layers."):
            out[f"{names[stem]}.{kind}"] = value
            continue
        _, _, layer, part = stem.split(".", 3)
        if part.startswith("mlp.experts."):
            _, _, expert, which = part.split(".")
            target = f"blk.{layer}.ffn_{which.removesuffix('_proj')}_exps.{kind}"
            experts.setdefault(target, {})[int(expert)] = value
        else:
            out[f"blk.{layer}.{names[part]}.{kind}"] = value
    return out | {k: np.stack([v[i] for i in range(len(v))]) for k, v in experts.items()}


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter keeps of a config.json."""
    kind = config["model_type"]
    if kind == "gemma4_text":
        return gemma4_metadata(config)
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if kind != "qwen2":  # whose heads have the width of hidden_size / heads
        values["attention.key_length"] = values["attention.value_length"] = config["head_dim"]
    if kind == "qwen3_moe":
        values["expert_count"] = config["num_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind in ("gemma2", "gemma3_text"):
        values["attention.sliding_window"] = config["sliding_window"]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap) is not None:
            values[cap] = config[cap]
    return values


def gemma4_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What it keeps of a Gemma 4's."""
    ropes, layers = config["rope_parameters"], config["num_hidden_layers"]
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = layers - config["num_kv_shared_layers"]
    heads = config["num_key_value_heads"], config["num_global_key_value_heads"]
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": layers,
        "feed_forward_length": [
            config["intermediate_size"] * (1 + (i >= own)) for i in range(layers)
        ],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [heads[not local] for local in windowed],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    fields: Mapping[str, Any],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None,
) -> None:
    """A GGUF file of these tensors (matrices quantised to `kind`), fields and the golden tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add |= {list: writer.add_array}
        add[type(value)](f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges([m for m in TABLE["merges"] if m.replace(" ", "") in TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in tensors.items():
        if kind is None or value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
