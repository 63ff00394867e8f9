"""Quantised models in checkpoints and files."""

from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import optax
import pytest

from purepost import snapshot, train
from purepost.algorithms import sft
from purepost.checkpoint import Checkpoints
from purepost.models import Decoder
from purepost.models.hub import load, load_adapter, save, save_adapter, save_orbax
from purepost.types import causal_rows
from purepost.weights import Kind, add_lora, dequantize, fp8, merge, nf4, quantize
from tests.compare import assert_same_bits

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = causal_rows(jnp.asarray([[1, 2, 3, 4]], jnp.int32), jnp.asarray([4]))


@pytest.fixture(scope="module")
def base() -> Decoder:
    return load(GOLDEN / "tiny-llama3").model


@pytest.mark.parametrize("kind", [nf4, fp8])
def test_a_run_on_quantised_weights_goes_on_where_it_stopped(
    base: Decoder, tmp_path: Path, kind: Kind
) -> None:
    """Only the adapters are stored; another base, or the same in other bits, is refused."""
    algorithm = sft(optax.adam(0.01))

    def fresh(block: int):
        model = add_lora(quantize(base, kind=kind, block=block), rank=2, key=jr.key(1))
        return algorithm.init(jr.key(0), model)

    with Checkpoints(tmp_path, every=1) as checkpoints:
        run = train(
            algorithm, checkpoints.restore(fresh(16)), lambda step: ROWS, key=jr.key(2), steps=2
        )
        states = [snapshot(state) for _, state, _ in checkpoints.saving(run)]
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert_same_bits(checkpoints.restore(fresh(16)), states[-1])
    with Checkpoints(tmp_path, every=1) as checkpoints:
        with pytest.raises(ValueError, match=r"the frozen weights that the run .* began with"):
            checkpoints.restore(fresh(8))


def test_files_hold_plain_weights(base: Decoder, tmp_path: Path) -> None:
    """A quantised model is an error that says what to do; done, it is saved. Its adapter is saved
    as it is.
    """
    tokenizer = load(GOLDEN / "tiny-llama3").tokenizer
    model = add_lora(quantize(base, block=16), where="up$", rank=2, key=jr.key(1))
    for i, write in enumerate((save, save_orbax)):
        with pytest.raises(ValueError, match=r"layers.attention.q\S*; merge and dequantize"):
            write(model, tokenizer, tmp_path / str(i))
        write(dequantize(merge(model)), tokenizer, tmp_path / f"plain{i}")
        again = load(tmp_path / f"plain{i}").model
        assert_same_bits(again, dequantize(merge(model)))
    save_adapter(model, tmp_path / "adapter", base="owner/name")
    assert_same_bits(load_adapter(quantize(base, block=16), tmp_path / "adapter"), model)
