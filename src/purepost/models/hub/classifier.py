"""Classifiers, reward models and critics in the layout of transformers'
`*ForSequenceClassification`: the decoder without its head, and `score.weight`.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike

from ...text.tokenizer import Tokenizer
from ...types import KeyArray
from ...weights import merge
from ..decoder import Config, init_decoder
from ..heads import SequenceClassifier, ValueHead, reward_model
from .convert import Names, Place, fill, on_default_device, tensors_from
from .documents import make_config, parse_config
from .families import names_of
from .fetch import fetch
from .load import check_tokenizer, open_model
from .safetensors import write_checkpoint
from .views import join_experts

_SCORE = "score.weight"


class LoadedClassifier(NamedTuple):
    """A classifier and its tokenizer."""

    model: SequenceClassifier
    tokenizer: Tokenizer


def load_classifier(
    source: str | Path,
    *,
    dtype: DTypeLike | None = jnp.float32,
    place: Place = on_default_device,
) -> LoadedClassifier:
    """A sequence classifier and its tokenizer, from the sources and with the errors of `load`.

    `ValueHead(model.decoder, model.head)` makes a critic of one that has one score.
    """
    hf_config, tensors, tokenizer = open_model(fetch(source))
    _, config = parse_config(hf_config)
    check_tokenizer(tokenizer, config.vocab_size)
    if _SCORE not in tensors:
        raise ValueError(
            f"expected {_SCORE} in {source}, got none: this is no sequence classifier; "
            "load the model and put a head on it (models.reward_model, models.value_model)"
        )
    shape, labels = tensors[_SCORE].shape, hf_config.get("id2label")
    if len(shape) != 2 or (isinstance(labels, dict) and len(labels) != shape[0]):
        raise ValueError(
            f"expected {_SCORE} of a row for each label of config.json, got shape {shape} and the "
            f"labels {labels!r:.80}; fetch the model again"
        )
    make = partial(_random, config, shape[0])
    skeleton = eqx.filter_eval_shape(make, jr.key(0))
    return LoadedClassifier(
        fill(skeleton, tensors, _names(names_of(config)), dtype, place), tokenizer
    )


def save_classifier(
    model: SequenceClassifier | ValueHead,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a classifier or a critic as the classifier that transformers reads, wholly or not at
    all; adapters are merged.

    transformers scores the last token that is not padding: a tokenizer whose padding is its end of
    text hides that token from it. Raises: ValueError for a head with a bias, which that layout
    lacks, and when something is there already.
    """
    if model.bias is not None:
        raise ValueError("expected a head without bias, got one; this layout has no place for it")
    plain = merge(model)
    decoder, labels = plain.decoder, range(model.head.shape[1])
    config = make_config(decoder.config, tokenizer, decoder.embed.dtype.name)
    (name,) = config["architectures"]
    config |= {
        "architectures": [name.replace("ForCausalLM", "ForSequenceClassification")],
        "id2label": {str(i): f"LABEL_{i}" for i in labels},
        "label2id": {f"LABEL_{i}": i for i in labels},
    }
    tensors = join_experts(tensors_from(plain, _names(names_of(decoder.config))))
    target = Path(directory).expanduser()
    also = tokenizer.save
    write_checkpoint(target, config, tensors, max_shard_bytes=max_shard_bytes, also=also)


def _random(config: Config, scores: int, key: KeyArray) -> SequenceClassifier:
    return reward_model(key, init_decoder(key, config), scores=scores)


def _names(decoder: Names) -> Names:
    """A classifier's names from its decoder's."""
    return {"head": (_SCORE, True), **{f"decoder.{name}": value for name, value in decoder.items()}}
