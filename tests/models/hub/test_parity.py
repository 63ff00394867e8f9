"""Logits of loaded models against those that transformers gives (tests/golden/make.py)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from purepost.models import Decoder
from purepost.models.hub import Loaded, load
from purepost.text import encode_prompt
from purepost.types import causal_rows

GOLDEN = Path(__file__).parents[2] / "golden"


def logits_at(model: Decoder, ids: list[np.ndarray], positions: list[np.ndarray]) -> np.ndarray:
    """[sequence, position, vocabulary]."""
    length = max(map(len, ids))
    padded = np.stack([np.pad(row, (0, length - len(row))) for row in ids])
    lengths = jnp.asarray([len(row) for row in ids], jnp.int32)
    hidden, _ = model(causal_rows(jnp.asarray(padded), lengths))
    taken = jnp.stack([hidden[i, at] for i, at in enumerate(positions)])
    return np.asarray(model.unembed(taken))


@pytest.mark.parametrize("name", ["tiny-tied", "tiny-llama3"])
def test_tiny_logits_at_long_positions_equal_transformers(name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    model, _ = load(GOLDEN / name)
    got = logits_at(model, [golden["ids"]], [golden["positions"]])[0]
    assert golden["positions"].max() == 1499
    np.testing.assert_allclose(got, golden["logits"], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return load("smollm2-135m")


def test_smollm2_logits_equal_transformers(smollm2: Loaded) -> None:
    golden = np.load(GOLDEN / "smollm2.npz")
    ids, positions = ([golden[f"{k}{i}"] for i in range(4)] for k in ("ids", "positions"))
    got = logits_at(smollm2.model, ids, positions)
    for i in range(4):
        top = np.take_along_axis(got[i], golden[f"top_ids{i}"], axis=-1)
        np.testing.assert_allclose(top, golden[f"top_logits{i}"], rtol=0, atol=1e-3)
        sample = got[i][:, golden["subset"]]
        np.testing.assert_allclose(sample, golden[f"subset_logits{i}"], rtol=0, atol=1e-3)


def test_smollm2_greedy_text_equals_transformers(smollm2: Loaded) -> None:
    """Each next token of transformers' greedy answer is the likeliest by our logits."""
    golden = np.load(GOLDEN / "smollm2.npz")
    questions = [
        "What is the capital of France?",
        "What is 7 + 5?",
        "Write one sentence about the sea.",
        "Name three primary colors.",
    ]
    ids = [golden[f"ids{i}"] for i in range(4)]
    prompts = [golden[f"prompt{i}"] for i in range(4)]
    answered = [
        np.minimum(np.arange(len(p) - 1, len(p) + 31), len(row) - 2)
        for p, row in zip(prompts, ids, strict=True)
    ]
    best = logits_at(smollm2.model, ids, answered).argmax(-1)
    for i, question in enumerate(questions):
        messages = [{"role": "user", "content": question}]
        assert encode_prompt(smollm2.tokenizer, messages) == prompts[i].tolist()
        np.testing.assert_array_equal(best[i], ids[i][answered[i] + 1])
        answer = smollm2.tokenizer.decode(ids[i][len(prompts[i]) :])
        assert answer.encode() == golden[f"answer{i}"].tobytes()
