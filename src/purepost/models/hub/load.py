"""Models in and out, whatever form they come in."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike

from ...text.tokenizer import Tokenizer
from ...tree import named_leaves
from ...weights import has_adapters, merge, without_lora
from ..decoder import Decoder, init_decoder
from .convert import Place, Tensor, decoder_from_tensors, fill, on_default_device, tensors_from
from .documents import make_config, parse_config, write_object
from .families import names_of
from .fetch import fetch
from .gguf import read_gguf
from .multimodal import is_multimodal, text_config, text_tensors
from .orbax import is_orbax, read_orbax, write_leaves
from .peft import save_adapter
from .safetensors import CONFIG, read_checkpoint, write_checkpoint, write_directory
from .views import join_experts, split_experts


class Loaded(NamedTuple):
    """A model and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer


class Opened(NamedTuple):
    """A model's files: config.json as Hugging Face has it, and tensors that are read when asked
    for.
    """

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer


def load(
    source: str | Path,
    *,
    dtype: DTypeLike | None = jnp.float32,
    place: Place = on_default_device,
    quantized: bool = False,
) -> Loaded:
    """A model and its tokenizer from a directory in Hugging Face layout or by Orbax, a GGUF file, a
    hub id, "smollm2-135m", the default model, or "gemma3-270m", to which Google's Gemma terms of
    use apply.

    Of a Gemma 3, Gemma 4 or Mistral 3 that reads images or sound as well this is the text model,
    and `save` writes one of text alone.

    `dtype` is that of the weights; None keeps what is on disk (float32 from a GGUF file).
    `place(name, values)` puts each leaf where it shall lie as soon as it is read, so that no
    device, and no host beside the file's cache, ever holds more than its part and one leaf:
    `lambda name, x: sharding.place({name: x}, mesh, rules)[name]`.
    `quantized` keeps a GGUF file's matrices in Q8_0 and Q4_0 in these bits, for adapters.
    Raises: FileNotFoundError for what is not there; ValueError for an unknown name or family,
    tensors that do not fit the configuration, and a tokenizer with more ids than the embeddings.
    """
    path = fetch(source)
    if quantized and path.suffix != ".gguf":
        raise ValueError(
            f"expected a GGUF file to keep its quantised weights, got {path}; load it as it is, "
            "and quantize the model"
        )
    if path.is_dir() and is_orbax(path):
        return _load_orbax(path, dtype, place)
    hf_config, tensors, tokenizer = open_model(path)
    _, config = parse_config(hf_config)
    check_tokenizer(tokenizer, config.vocab_size)
    names, made = names_of(config), lambda skeleton: {}
    if quantized:
        from .gguf_blocks import kept_weights

        made = partial(kept_weights, tensors, names, jnp.float32 if dtype is None else dtype, place)
    model = decoder_from_tensors(config, tensors, names, dtype, place, made=made)
    return Loaded(model, tokenizer)


def open_model(path: Path) -> Opened:
    """The files of a model in Hugging Face layout, or in one GGUF file; those of its text model, if
    it reads images or sound as well.
    """
    if path.is_dir():
        hf_config, tensors = read_checkpoint(path)
        if is_multimodal(hf_config):
            hf_config, tensors = text_config(hf_config), text_tensors(tensors)
        return Opened(hf_config, split_experts(tensors), Tokenizer.from_directory(path))
    if path.suffix == ".gguf":
        return Opened(*read_gguf(path))
    raise ValueError(f"expected a directory or a .gguf file, got {path}; name one of those")


def check_tokenizer(tokenizer: Tokenizer, most: int) -> None:
    """Raise for a tokenizer that has more ids than the embeddings."""
    if tokenizer.vocab_size > most:
        raise ValueError(
            f"expected a tokenizer of at most {most} ids, the model's embeddings, "
            f"got {tokenizer.vocab_size}; the tokenizer belongs to another model"
        )


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
    config = make_config(model.config, tokenizer, plain.embed.dtype.name)

    def also(path: Path) -> None:
        tokenizer.save(path)
        if has_adapters(model) and not merged:
            save_adapter(model, path / "adapter", base=str(target))

    tensors = join_experts(tensors_from(plain, names_of(model.config)))
    write_checkpoint(target, config, tensors, max_shard_bytes=max_shard_bytes, also=also)


def save_orbax(model: Decoder, tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write a model, its adapters merged, and its tokenizer as `load` reads them, the weights by
    Orbax; wholly or not at all. Raises: ValueError when something is there already.
    """
    plain = merge(model)
    config = make_config(model.config, tokenizer, plain.embed.dtype.name)

    def write(path: Path) -> None:
        write_object(path / CONFIG, config)
        tokenizer.save(path)
        write_leaves(plain, path)

    write_directory(Path(directory).expanduser(), write)


def _load_orbax(path: Path, dtype: DTypeLike | None, place: Place) -> Loaded:
    hf_config, leaves = read_orbax(path)
    _, config = parse_config(hf_config)
    tokenizer = Tokenizer.from_directory(path)
    check_tokenizer(tokenizer, config.vocab_size)
    skeleton = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    names = {name: (name, False) for name, _ in named_leaves(skeleton)}
    return Loaded(fill(skeleton, leaves, names, dtype, place), tokenizer)
