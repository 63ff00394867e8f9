"""Models in and out, whatever form they come in."""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from ...text.tokenizer import Tokenizer
from ...weights import has_adapters, merge, without_lora
from ..decoder import Decoder
from .convert import decoder_from_tensors, tensors_from_decoder
from .families import family_of
from .fetch import fetch
from .gguf import read_gguf
from .peft import save_adapter
from .safetensors import read_checkpoint, write_checkpoint


class Loaded(NamedTuple):
    """A model and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer


def load(source: str | Path, *, dtype: DTypeLike | None = jnp.float32) -> Loaded:
    """A model and its tokenizer from a directory in Hugging Face layout, a GGUF file, a hub id, or
    "smollm2-135m", the default model.

    `dtype` is that of the weights; None keeps what is on disk (float32 from a GGUF file).
    Raises: FileNotFoundError for what is not there; ValueError for an unknown name or family,
    tensors that do not fit the configuration, and a tokenizer with more ids than the embeddings.
    """
    path = fetch(source)
    if path.is_dir():
        hf_config, tensors = read_checkpoint(path)
        tokenizer = Tokenizer.from_directory(path)
    elif path.suffix == ".gguf":
        hf_config, tensors, tokenizer = read_gguf(path)
    else:
        raise ValueError(f"expected a directory or a .gguf file, got {path}; name one of those")
    family = family_of(hf_config.get("model_type"))
    config = family.config_from_hf(hf_config)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"expected a tokenizer of at most {config.vocab_size} ids, the model's embeddings, "
            f"got {tokenizer.vocab_size}; the tokenizer belongs to another model"
        )
    return Loaded(decoder_from_tensors(config, tensors, family, dtype), tokenizer)


def save(
    model: Decoder,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    merged: bool = True,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a model and its tokenizer in the layout that transformers reads, wholly or not at all.

    Adapters are merged into the weights; with merged=False the base model is written, and its
    adapter into the folder `adapter` inside. Raises: ValueError when something is there already.
    """
    target = Path(directory).expanduser()
    plain = merge(model) if merged else without_lora(model)
    family = family_of(model.config.family)
    config: dict[str, Any] = {
        **family.config_to_hf(model.config),
        "dtype": plain.embed.dtype.name,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_ids[0] if len(tokenizer.eos_ids) == 1 else tokenizer.eos_ids,
        "pad_token_id": tokenizer.pad_id,
    }

    def also(path: Path) -> None:
        tokenizer.save(path)
        if has_adapters(model) and not merged:
            save_adapter(model, path / "adapter", base=str(target))

    tensors = tensors_from_decoder(plain, family)
    write_checkpoint(target, config, tensors, max_shard_bytes=max_shard_bytes, also=also)
