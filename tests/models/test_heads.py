"""Heads: scores at the last token of an episode, values where log-probabilities are read."""

import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder
from purepost.models.heads import SequenceClassifier, ValueHead, headless, reward_model, value_model
from purepost.models.hub import load, load_classifier, save_classifier
from purepost.models.hub.safetensors import read_checkpoint
from purepost.text import Tokenizer
from purepost.types import causal_rows, group_rows
from purepost.weights import add_lora

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(GOLDEN / "tiny-tied")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden classifier beside the golden tokenizer."""
    path = tmp_path_factory.mktemp("classifier") / "model"
    shutil.copytree(GOLDEN / "classifier", path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDEN / "tiny-tied" / name, path / name)
    return path


def test_scores_equal_transformers(directory: Path) -> None:
    golden = np.load(GOLDEN / "classifier.npz")
    model, _ = load_classifier(directory)
    got = model(causal_rows(jnp.asarray(golden["ids"]), jnp.asarray(golden["lengths"])))
    assert got.shape == (4, 1, 3)
    np.testing.assert_allclose(got[:, 0], golden["scores"], rtol=0, atol=1e-5)
    assert np.ptp(golden["scores"], axis=0).min() > 0.1


def test_saved_as_transformers_saves(directory: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model, _ = load_classifier(directory, dtype=None)
    save_classifier(model, tokenizer, tmp_path / "model")
    (config, before), (saved, after) = map(read_checkpoint, (directory, tmp_path / "model"))
    assert set(before) == set(after) and "score.weight" in after
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    same = "architectures model_type id2label label2id pad_token_id hidden_size dtype".split()
    assert {name: saved[name] for name in same} == {name: config[name] for name in same}
    assert saved["architectures"] == ["LlamaForSequenceClassification"]


def test_a_critic_is_a_classifier_of_one_score(tmp_path: Path, tokenizer: Tokenizer) -> None:
    decoder = headless(load(GOLDEN / "tiny-llama3").model)
    critic = ValueHead(decoder, jr.normal(jr.key(1), (32, 1), jnp.float32))
    save_classifier(critic, tokenizer, tmp_path / "critic")
    again, _ = load_classifier(tmp_path / "critic")
    assert jax.tree.structure(ValueHead(again.decoder, again.head)) == jax.tree.structure(critic)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(critic), strict=True):
        np.testing.assert_array_equal(x, y)
    biased = ValueHead(decoder, critic.head, jnp.ones(1, jnp.float32))
    with pytest.raises(ValueError, match="expected a head without bias"):
        save_classifier(biased, tokenizer, tmp_path / "biased")


def test_every_episode_of_a_row_is_scored(model: Decoder) -> None:
    """Two completions of one prompt in a row, and each alone after the prompt."""
    rng = np.random.default_rng(1)
    prompt, ends = rng.integers(1, 19, 4), [rng.integers(1, 19, n) for n in (3, 2)]
    branches = np.zeros((1, 2, 3), np.int32)
    for i, end in enumerate(ends):
        branches[0, i, : len(end)] = end
    rows = group_rows(
        jnp.asarray(prompt[None], jnp.int32),
        jnp.array([4], jnp.int32),
        jnp.asarray(branches),
        jnp.array([[3, 2]], jnp.int32),
        jnp.ones((1, 2, 3), bool),
    )
    classifier = reward_model(jr.key(0), model, scores=2)
    together = classifier(rows)
    assert together.shape == (1, 2, 2)
    alone = np.zeros((2, 7), np.int32)
    for i, end in enumerate(ends):
        alone[i, : 4 + len(end)] = [*prompt, *end]
    apart = classifier(causal_rows(jnp.asarray(alone), jnp.array([7, 6], jnp.int32)))[:, 0]
    np.testing.assert_allclose(together[0], apart, rtol=0, atol=1e-5)
    assert jnp.abs(apart[0] - apart[1]).min() > 1e-3


def test_values_are_read_before_their_tokens(model: Decoder) -> None:
    """By hand from the hidden states: V of token t at its parent's, 0 where nothing is trained."""
    tokens = jnp.asarray(np.random.default_rng(2).integers(1, 19, (2, 6)), jnp.int32)
    mask = jnp.array([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]], bool)
    rows = causal_rows(tokens, jnp.array([6, 4], jnp.int32), mask)
    head, bias = jr.normal(jr.key(1), (10, 1), jnp.float32), jnp.array([0.5], jnp.float32)
    hidden = np.asarray(model(rows)[0], np.float64)
    after = hidden @ np.asarray(head, np.float64)[:, 0] + 0.5
    expected = np.where(mask, np.pad(after[:, :-1], ((0, 0), (1, 0))), 0)
    critic = ValueHead(model, head, bias)
    np.testing.assert_allclose(critic(rows), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(critic.after(rows), after, rtol=0, atol=1e-5)


def test_a_new_critic_says_0_and_has_no_other_head(model: Decoder) -> None:
    critic = value_model(load(GOLDEN / "tiny-llama3").model)
    assert critic.decoder.head is None and critic.decoder.config.tie_embeddings
    rows = causal_rows(jnp.ones((1, 3), jnp.int32), jnp.array([3], jnp.int32))
    np.testing.assert_array_equal(value_model(model)(rows), np.zeros((1, 3)))
    # The loss of a head of zeros still moves it.
    grads = eqx.filter_grad(lambda m: ((m(rows) - 1) ** 2).sum())(value_model(model))
    assert jnp.abs(grads.head).max() > 0


def test_adapters_of_a_reward_model_are_merged_on_export(
    directory: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model, _ = load_classifier(directory)
    adapted = add_lora(model, rank=2, key=jr.key(0))
    save_classifier(adapted, tokenizer, tmp_path / "model")
    again, _ = load_classifier(tmp_path / "model")
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_no_classifier(directory: Path, tmp_path: Path, model: Decoder) -> None:
    with pytest.raises(ValueError, match="expected score.weight in .*, got none"):
        load_classifier(GOLDEN / "tiny-tied")
    path = tmp_path / "m"
    shutil.copytree(directory, path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"0": "LABEL_0",', ""))
    with pytest.raises(ValueError, match="a row for each label"):
        load_classifier(path)
    with pytest.raises(ValueError, match="at least 1 score"):
        reward_model(jr.key(0), model, scores=0)
    assert isinstance(reward_model(jr.key(0), model), SequenceClassifier)
