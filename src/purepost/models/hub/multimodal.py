"""The text models of checkpoints that read images or sound as well.

Their config.json has the text model's in `text_config`. Its weights are "language_model.model.…" as
these checkpoints were first stored and "model.language_model.…" as transformers names them since;
those of the other parts are left out by their names.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from .views import Makers, Tensor, View

# By `model_type`, what transformers takes where `text_config` leaves it out.
MULTIMODAL: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "mistral3": {"model_type": "mistral"},
}

# Fields and tensors of the parts that read other things than text.
_OTHER_FIELDS = re.compile(
    r"(vision|audio|image|video|mm|multimodal|projector|spatial|boi|eoi|boa|eoa)_\w+"
)
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..+"
)
_TEXT = re.compile(r"(?:language_model\.model|model\.language_model)\.(.+)")
_HEAD = re.compile(r"language_model\.(lm_head\..+)")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a model that has a text model among others."""
    kind = config.get("model_type")
    known = isinstance(kind, str) and kind in MULTIMODAL
    return known and isinstance(config.get("text_config"), Mapping)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text model alone; whether its head is tied the whole model says."""
    of_text = config["text_config"]
    outer = {
        name: value
        for name, value in config.items()
        if not _OTHER_FIELDS.fullmatch(name)
        and name not in ("model_type", "text_config", "architectures")
    }
    tied = outer.get("tie_word_embeddings")
    merged = {**MULTIMODAL[config["model_type"]], **outer, **of_text}
    return merged if tied is None else {**merged, "tie_word_embeddings": tied}


def text_name(name: str) -> str:
    """The name of a tensor in a checkpoint of text alone; one of no text model stays as it is."""
    text, head = _TEXT.fullmatch(name), _HEAD.fullmatch(name)
    return f"model.{text[1]}" if text else head[1] if head else name


def text_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """All tensors but those of the other parts that are known, by `text_name`.

    Raises: ValueError for one that is there under two names.
    """
    makers: Makers = {}
    for name in tensors:
        if _OTHER_PARTS.fullmatch(name):
            continue
        plain = text_name(name)
        if plain in makers:
            raise ValueError(
                f"expected {plain} once in the checkpoint, got it under two names, one of them "
                f"{name}; fetch it again"
            )
        makers[plain] = partial(tensors.__getitem__, name)
    return View(makers)
