"""Batches are a function of the step; every epoch has every example once; rows are forests."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost import train
from purepost.algorithms import sft
from purepost.data import (
    Batches,
    judged_rows,
    padding_share,
    pair_rows,
    prompt_tasks,
    read,
    sft_rows,
    step_rows,
)
from purepost.data.order import stream
from purepost.models import Config, init_decoder
from purepost.text import Tokenizer
from purepost.types import Rows, check_rows
from tests.data.shared import make_tokenizer

Document = tuple[int, ...]


def words(rng: np.random.Generator, most: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(5, 19, rng.integers(1, most + 1)))


def make(n: int, record: Callable[[np.random.Generator], dict[str, Any]]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [record(rng) for _ in range(n)]


TEXTS = make(37, lambda r: {"text": words(r, 12)})
PAIRS = make(
    9,
    lambda r: {
        "prompt": words(r, 6), "chosen": words(r, 5), "rejected": words(r, 5),
        "margin": int(r.integers(1, 9)),
    },
)  # fmt: skip
JUDGED = make(
    9,
    lambda r: {
        "prompt": words(r, 6), "completion": words(r, 9), "label": bool(r.integers(2)),
    },
)  # fmt: skip
SOLUTIONS = make(
    9,
    lambda r: {
        "prompt": words(r, 6), "completions": ["w5 w6", "w7", words(r, 3)],
        "labels": [True, bool(r.integers(2)), False],
    },
)  # fmt: skip


def documents(rows: Rows) -> list[Document]:
    """The sequences of rows without branches: from each root to the end of its subtree."""
    tokens, end, parent = (np.asarray(x) for x in (rows.tokens, rows.end, rows.parent))
    return [
        tuple(tokens[b, i : end[b, i]].tolist())
        for b, i in zip(*np.nonzero(parent == np.arange(parent.shape[1])), strict=True)
        if end[b, i] > i + 1
    ]


def encoded(text: str) -> Document:
    return (*(int(word[1:]) for word in text.split()), 3)


@pytest.mark.parametrize("packed", [True, False])
def test_every_epoch_has_every_example_once(tokenizer: Tokenizer, packed: bool) -> None:
    data = sft_rows(read(TEXTS), tokenizer, width=16, rows=4, seed=1, packed=packed)
    epochs = [
        [data(epoch * data.steps_per_epoch + i) for i in range(data.steps_per_epoch)]
        for epoch in range(2)
    ]
    want = Counter(encoded(row["text"]) for row in TEXTS)
    for epoch in epochs:
        assert Counter(doc for rows in epoch for doc in documents(rows)) == want
        for rows in epoch:
            check_rows(rows)
    first, second = ([documents(rows) for rows in epoch] for epoch in epochs)
    assert first != second
    assert data.report.tokens == sum(map(len, want.elements()))
    assert data.report.trained == data.report.tokens - len(TEXTS)
    assert (data.report.records, data.report.cut, data.report.dropped) == (37, 0, 0)


def test_packed_rows_have_one_shape_and_little_padding(tokenizer: Tokenizer) -> None:
    data = sft_rows(read(TEXTS), tokenizer, width=32, rows=3, seed=0)
    batches = [data(step) for step in range(data.steps_per_epoch)]
    assert len({(jax.tree.structure(b), b.tokens.shape) for b in batches}) == 1
    assert batches[0].tokens.shape == (3, 32)
    # No fewer rows could hold these sequences.
    taken = sum(len(set(np.nonzero(np.asarray(b.mask))[0])) for b in batches)
    assert taken == -(-data.report.tokens // 32)
    assert padding_share(batches[0]) < 0.15
    for rows in batches:
        mask, episode = np.asarray(rows.mask), np.asarray(rows.episode)
        assert mask.sum(1).max() <= rows.most_trained and episode.max() < rows.episodes
        pairs = zip(np.nonzero(mask)[0], episode[mask], strict=True)
        assert len(documents(rows)) == len(set(pairs))


def test_rows_alone_have_few_widths(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    long = [{"text": words(rng, 150)} for _ in range(60)]
    data = sft_rows(read(long), tokenizer, width=100, rows=2, seed=0, packed=False)
    shapes = {(data(s).tokens.shape, data(s).capacity) for s in range(data.steps_per_epoch)}
    assert {shape for shape, _ in shapes} <= {(2, 32), (2, 48), (2, 64), (2, 96), (2, 100)}
    assert len(shapes) <= 5 and data.report.cut > 0


def test_steps_are_addressed_and_the_hash_tells_the_data(
    tokenizer: Tokenizer, with_bos: Tokenizer
) -> None:
    def make(rows: Sequence[dict[str, Any]] = TEXTS, t: Tokenizer = tokenizer) -> Batches[Rows]:
        return sft_rows(read(rows), t, width=16, rows=4, seed=2)

    straight = [make()(step) for step in range(12)]
    jumping = make()
    for step in (11, 0, 7):
        assert jax.tree.all(jax.tree.map(np.array_equal, jumping(step), straight[step]))
    assert make().hash == make().hash
    assert (
        len({make().hash, make(TEXTS[::-1]).hash, make(TEXTS[1:]).hash, make(t=with_bos).hash}) == 4
    )


def test_what_is_cut_and_dropped_is_counted(tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": "w5", "completion": "w6"},
        {"prompt": "w5", "completion": "w6 w7 w8"},
        {"prompt": "w5 w6 w7", "completion": "w8"},
    ]
    data = sft_rows(read(rows), tokenizer, width=3, rows=2, seed=0)
    assert (data.report.records, data.report.cut, data.report.dropped) == (3, 1, 1)
    assert str(data.report) == (
        "2 examples of 3 records: 6 tokens, 4 of them trained; 1 cut, 1 dropped"
    )
    with pytest.raises(ValueError, match="something to train, got none of 3 records; give them"):
        sft_rows(read(rows), tokenizer, width=1, rows=2, seed=0)


def test_pairs_lie_behind_their_prompt(tokenizer: Tokenizer) -> None:
    data = pair_rows(read(PAIRS), tokenizer, width=16, rows=4, seed=0)
    found = {}
    for step in range(data.steps_per_epoch):
        pairs = data(step)
        check_rows(pairs.rows)
        assert pairs.rows.episodes == 2 and pairs.rows.tokens.shape == (4, 32)
        for i in np.flatnonzero(np.asarray(pairs.real)):
            tokens, mask, episode = (
                np.asarray(x)[i] for x in (pairs.rows.tokens, pairs.rows.mask, pairs.rows.episode)
            )
            texts = [tuple(tokens[mask & (episode == k)].tolist()) for k in (0, 1)]
            prompt = tuple(tokens[: np.flatnonzero(mask)[0]].tolist())
            found[(prompt, *texts)] = float(pairs.margins[i])
        assert not np.asarray(pairs.margins)[~np.asarray(pairs.real)].any()
        assert not np.asarray(pairs.rows.mask)[~np.asarray(pairs.real)].any()
    assert found == {
        (encoded(row["prompt"])[:-1], encoded(row["chosen"]), encoded(row["rejected"])): float(
            row["margin"]
        )
        for row in PAIRS
    }


def test_judged_completions_have_their_labels(tokenizer: Tokenizer) -> None:
    data = judged_rows(read(JUDGED), tokenizer, width=16, rows=4, seed=0)
    found = {}
    for step in range(data.steps_per_epoch):
        batch = data(step)
        check_rows(batch.rows)
        docs = documents(batch.rows)
        assert len(docs) == int(batch.real.sum()) and not bool(batch.good[~batch.real].any())
        found |= dict(zip(docs, batch.good.tolist(), strict=False))
    assert found == {
        (*encoded(row["prompt"])[:-1], *encoded(row["completion"])): row["label"] for row in JUDGED
    }


def test_steps_of_solutions_are_marked(tokenizer: Tokenizer) -> None:
    data = step_rows(read(SOLUTIONS), tokenizer, width=32, rows=4, seed=0, separator=" w4 ")
    found = {}
    for step in range(data.steps_per_epoch):
        batch = data(step)
        check_rows(batch.rows)
        tokens, mask, right = (
            np.asarray(x) for x in (batch.rows.tokens, batch.rows.mask, batch.right)
        )
        assert not right[~mask].any() and (tokens[mask] == 4).all()
        for i, document in enumerate(documents(batch.rows)):
            found[document] = right[i, mask[i]].tolist()
    assert found == {
        encoded(" ".join([row["prompt"], *(f"{step} w4" for step in row["completions"])]))[:-1]:
            row["labels"]
        for row in SOLUTIONS
    }  # fmt: skip


def test_tasks_carry_every_column(tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"w{i}", "answer": i} for i in range(5, 15)]
    rows += [{"prompt": "w5 w6 w7 w8", "answer": 0}, {"prompt": "w15 w16", "hint": "x"}]
    data = prompt_tasks(read(rows), tokenizer, width=3, prompts=4, seed=0)
    assert (data.report.records, data.report.dropped, data.steps_per_epoch) == (12, 1, 3)
    seen = []
    for step in range(11):  # 4 epochs of 11 prompts
        tasks = data(step)
        assert tasks.prompts.tokens.shape == (4, 3) and set(tasks.columns) == {
            "prompt", "answer", "hint",
        }  # fmt: skip
        for ids, n, text in zip(
            tasks.prompts.tokens.tolist(),
            tasks.prompts.lengths.tolist(),
            tasks.columns["prompt"],
            strict=True,
        ):
            assert tuple(ids[:n]) == encoded(text)[:-1]
        seen += tasks.columns["prompt"]
        assert len(set(tasks.prompts.ids.tolist())) == 4
        for prompt, answer in zip(seen[-4:], tasks.columns["answer"], strict=True):
            assert answer == (None if prompt == "w15 w16" else int(prompt[1:]))
    assert set(Counter(seen).values()) == {4} and all(
        len(set(seen[epoch * 11 : epoch * 11 + 11])) == 11 for epoch in range(4)
    )
    with pytest.raises(ValueError, match="at most 0 tokens, got none of 12"):
        prompt_tasks(read(rows), tokenizer, width=0, prompts=4, seed=0)
    with pytest.raises(ValueError, match="row 0: expected prompt to be text"):
        prompt_tasks(read([{"question": "w5"}]), tokenizer, width=3, prompts=4, seed=0)


def test_a_stream_goes_from_epoch_to_epoch() -> None:
    draw = stream(5, 7, seed=3)
    places = np.concatenate([draw(step) for step in range(5)])
    np.testing.assert_array_equal(np.sort(places.reshape(7, 5), 1), np.arange(35).reshape(7, 5))
    np.testing.assert_array_equal(stream(5, 7, seed=3)(4), places[28:])
    for n, batch, words in ((0, 1, "dataset with rows"), (1, 0, "batch ≥ 1, got 0")):
        with pytest.raises(ValueError, match=words):
            stream(n, batch, seed=0)
    with pytest.raises(ValueError, match="step ≥ 0, got -1"):
        draw(-1)


def test_rows_that_are_wrong_are_named(tokenizer: Tokenizer) -> None:
    rows = [*TEXTS[:3], {"text": None}]
    with pytest.raises(ValueError, match="row 3: expected text to be text, got None"):
        sft_rows(read(rows), tokenizer, width=16, rows=4, seed=0)
    with pytest.raises(
        ValueError, match=r"row 0: expected columns chosen, rejected, got \['text'\]"
    ):
        pair_rows(read(TEXTS), tokenizer, width=16, rows=4, seed=0)
    silent = [{"messages": [{"role": "user", "content": "w5"}]}]
    with pytest.raises(
        ValueError, match="row 0: expected at least one message of role 'assistant'"
    ):
        sft_rows(read(silent), tokenizer, width=16, rows=4, seed=0)


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
WORDS = st.sampled_from(["", "w5 w6", "<e>", "w7 <a> w8", "é w9"]) | st.text(max_size=6)
MESSAGES = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, ROLES, WORDS), max_size=4)
CONTENT = WORDS | MESSAGES


@given(
    records=st.lists(
        st.fixed_dictionaries({"messages": MESSAGES})
        | st.fixed_dictionaries({"prompt": CONTENT, "completion": CONTENT})
        | st.fixed_dictionaries({"prompt": CONTENT, "chosen": CONTENT, "rejected": CONTENT}),
        min_size=1,
        max_size=1,
    ),
    width=st.integers(1, 20),
)
def test_any_dialogue_is_rows_or_a_value_error(records: list[dict[str, Any]], width: int) -> None:
    make = pair_rows if "chosen" in records[0] else sft_rows
    try:
        data = make(read(records), make_tokenizer(), width=width, rows=1, seed=0)
    except ValueError as error:
        assert "row 0: " in str(error) or "something to train" in str(error)
        return
    batch = data(0)
    rows = batch if isinstance(batch, Rows) else batch.rows
    check_rows(rows)
    assert int(rows.mask.sum()) == data.report.trained > 0


def test_it_trains(tokenizer: Tokenizer) -> None:
    """Supervised fine-tuning on packed rows: every sequence here is w5 w6 w7."""
    data = sft_rows(read([{"text": "w5 w6 w7"}] * 9), tokenizer, width=16, rows=2, seed=0)
    config = Config(19, 16, 32, 1, 2, 1, 8, rope_theta=100.0, max_positions=64)
    algorithm = sft(optax.adam(3e-2))
    state = algorithm.init(jax.random.key(0), init_decoder(jax.random.key(1), config))
    metrics = [m for _, _, m in train(algorithm, state, data, key=jax.random.key(2), steps=20)]
    losses = [float(m["loss"].value) for m in metrics]
    assert losses[0] > 2.0 and losses[-1] < 0.1
