"""GGUF weights that stay in their bits stand for the numbers that they are dequantised to."""

from pathlib import Path
from typing import Any

import gguf
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Config, Decoder, init_decoder
from purepost.models.hub import load
from purepost.models.hub.convert import tensors_from
from purepost.models.names import DENSE
from purepost.tree import named_leaves
from purepost.weights import Quantized, dequantize, is_kind
from tests.compare import assert_same_bits
from tests.models.hub.gguf_files import GOLDEN, stored_tensors, write_gguf

CONFIG = Config(
    vocab_size=288,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=False,
)
FIELDS: dict[str, Any] = {
    "context_length": 2048,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
HEADS = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


def written(path: Path, kind: str) -> Path:
    """A GGUF file of a small Llama whose matrices are in this type."""
    tensors = tensors_from(init_decoder(jr.key(0), CONFIG), DENSE)
    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    stored = stored_tensors(HEADS, contiguous)
    write_gguf(path, stored, FIELDS, kind=gguf.GGMLQuantizationType[kind])
    return path


def quantized_names(model: Decoder) -> set[str]:
    return {name for name, w in named_leaves(model, is_kind) if isinstance(w, Quantized)}


@pytest.mark.parametrize(("kind", "bytes_"), [("Q8_0", 34), ("Q4_0", 18)])
def test_the_numbers_are_the_same(tmp_path: Path, kind: str, bytes_: int) -> None:
    """To the bit, the heads of a Llama in order; a block of 32 takes what it takes in the file."""
    path = written(tmp_path / "m.gguf", kind)
    plain, kept = load(path).model, load(path, quantized=True).model
    assert_same_bits(dequantize(kept), plain)
    assert len(quantized_names(kept)) >= 7
    up = kept.layers.mlp.up
    assert up.codes.nbytes + up.scales.nbytes == np.prod(up.shape) // 32 * bytes_


def test_other_types_are_dequantised(tmp_path: Path) -> None:
    kept = load(written(tmp_path / "m.gguf", "Q5_0"), quantized=True).model
    assert not quantized_names(kept)
    with pytest.raises(ValueError, match="expected a GGUF file to keep its quantised weights"):
        load(GOLDEN / "tiny-llama3", quantized=True)
