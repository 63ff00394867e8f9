"""The names that the families' checkpoints share.

Path of our leaf → (name in a Hugging Face checkpoint, whether it is stored transposed, [out, in]).
The first `{}` is the layer: our leaf stacks all layers on its first axis; a second one is the
expert, stacked on the next.
"""

Names = dict[str, tuple[str, bool]]

_LAYER = "model.layers.{}."

DENSE: Names = {
    "embed": ("model.embed_tokens.weight", False),
    "layers.attention_norm": (_LAYER + "input_layernorm.weight", False),
    "layers.attention.q": (_LAYER + "self_attn.q_proj.weight", True),
    "layers.attention.k": (_LAYER + "self_attn.k_proj.weight", True),
    "layers.attention.v": (_LAYER + "self_attn.v_proj.weight", True),
    "layers.attention.o": (_LAYER + "self_attn.o_proj.weight", True),
    "layers.mlp_norm": (_LAYER + "post_attention_layernorm.weight", False),
    "layers.mlp.gate": (_LAYER + "mlp.gate_proj.weight", True),
    "layers.mlp.up": (_LAYER + "mlp.up_proj.weight", True),
    "layers.mlp.down": (_LAYER + "mlp.down_proj.weight", True),
    "norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
}

QKV_BIAS: Names = {
    f"layers.attention.{x}_bias": (f"{_LAYER}self_attn.{x}_proj.bias", False) for x in "qkv"
}

QK_NORM: Names = {
    f"layers.attention.{x}_norm": (f"{_LAYER}self_attn.{x}_norm.weight", False) for x in "qk"
}

# Norms before and after attention and MLP: "post attention" is then what its name says.
POST_NORMS: Names = {
    "layers.attention_post_norm": (_LAYER + "post_attention_layernorm.weight", False),
    "layers.mlp_norm": (_LAYER + "pre_feedforward_layernorm.weight", False),
    "layers.mlp_post_norm": (_LAYER + "post_feedforward_layernorm.weight", False),
}

EXPERTS: Names = {
    "layers.mlp.router": (_LAYER + "mlp.gate.weight", True),
    "layers.mlp.gate": (_LAYER + "mlp.experts.{}.gate_proj.weight", True),
    "layers.mlp.up": (_LAYER + "mlp.experts.{}.up_proj.weight", True),
    "layers.mlp.down": (_LAYER + "mlp.experts.{}.down_proj.weight", True),
}
