"""Dialogues with environments in Python: ids as they were sampled, groups whole, faults contained.

The sampler is a stub that draws from its own list of words, so that no model is run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from experiments.probes.probe import CONFIG
from purepost.environments.dialogues import dialogues
from purepost.environments.host import Pool
from purepost.models import Decoder, init_decoder
from purepost.rollout.collect import Collect, Episodes, Tasks, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.environment import ERROR, MAX_TURNS, TIMEOUT
from purepost.rollout.sample import LENGTH, STOP, Completions, Prompts, pad_prompts
from purepost.rollout.score import score
from purepost.text import Tokenizer
from purepost.types import KeyArray, check_rows
from tests.compare import assert_same_bits
from tests.environments.scripted import Scripted

USER, ASSISTANT, END, THINK = 1, 2, 3, 4
PLAIN = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<e>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# Reasoning, all up to <t>, is dropped from every turn but the last.
FORGETS = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}"
    "{{ m.content.split('<t>')[-1] if m.role != 'user' else m.content }}<e>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SAMPLING = Sampling(max_tokens=4, stop_ids=(END,))
MODEL = init_decoder(jr.key(0), dataclasses.replace(CONFIG, vocab_size=20))


def make_tokenizer(template: str) -> Tokenizer:
    vocab = {"<s>": 0, "<u>": USER, "<a>": ASSISTANT, "<e>": END, "<t>": THINK}
    vocab |= {f"w{i}": i for i in range(5, 20)}
    backend = Backend(models.WordLevel(vocab, unk_token="w5"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [AddedToken(t, special=True) for t in ("<s>", "<u>", "<a>", "<e>", "<t>")]
    backend.add_special_tokens(special)
    return Tokenizer(backend, None, (END,), 0, template)


class Words:
    """A sampler that says, in every turn, the next of some lists of ids; it keeps the prompts."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = turns
        self.prompts: list[list[list[int]]] = []

    def __call__(self, key: KeyArray, model: Decoder, prompts: Prompts) -> Completions:
        said = self.turns[len(self.prompts) % len(self.turns)]
        rows = zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)
        self.prompts.append([row[:n] for row, n in rows])
        p = prompts.lengths.shape[0]
        tokens = np.zeros((p, 1, SAMPLING.max_tokens), np.int32)
        tokens[:, 0, : len(said)] = said
        logps = np.where(tokens > 0, -tokens / 10, 0).astype(np.float32)
        n = jnp.full((p, 1), len(said), jnp.int32)
        return Completions(jnp.asarray(tokens), jnp.asarray(logps), n, n * 0)


def tasks(*scripts: list[Any], ids: list[int] | None = None) -> Tasks:
    ids = list(range(len(scripts))) if ids is None else ids
    return Tasks(pad_prompts([[0]] * len(scripts), ids=ids), {"script": list(scripts)})


def collect(
    pool: Pool, sample: Words, *, template: str = PLAIN, group: int = 2, **options: Any
) -> Collect:
    options = {"max_turns": 4, "max_context": 40} | options
    tokenizer = make_tokenizer(template)
    return dialogues(pool, tokenizer, SAMPLING, group=group, sample=sample, **options)


@pytest.fixture
def pool():
    pool = Pool(Scripted, step_timeout=1.0, workers=32, limit=50)
    yield pool
    pool.close()


def texts(episodes: Episodes, i: int) -> tuple[list[int], list[int], list[bool]]:
    """A rollout's prompt, what stands behind it, and which of it was sampled."""
    group, n = int(episodes.group[i]), int(episodes.lengths[i])
    prompt = episodes.prompts.tokens[group, : int(episodes.prompts.lengths[group])].tolist()
    return prompt, episodes.tokens[i, :n].tolist(), episodes.mask[i, :n].tolist()


def test_a_prompt_is_the_one_before_with_the_sampled_ids(pool: Pool) -> None:
    """The words shown are w10, w12, w13. The first turn ends itself, the second is cut off, so that
    the template ends it; that end is not the policy's.
    """
    words = Words([7, 8, END], [9, 9, 9, 9], [11, END])
    run = collect(pool, words)
    episodes, metrics = run(jr.key(0), MODEL, tasks([0, 0.25, 0.5, "done"]))
    first = [USER, 10, END, ASSISTANT]
    second = [7, 8, END, USER, 12, END, ASSISTANT]
    third = [9, 9, 9, 9, END, USER, 13, END, ASSISTANT]
    assert [p[0] for p in words.prompts] == [first, first + second, first + second + third]
    for i in range(2):
        prompt, tokens, mask = texts(episodes, i)
        assert prompt == first and tokens == [*second, *third, 11, END]
        assert mask == [True] * 3 + [False] * 4 + [True] * 4 + [False] * 5 + [True] * 2
        logps = np.where(mask, -np.array(tokens) / 10, 0)
        np.testing.assert_allclose(episodes.logps[i, : len(mask)], logps, rtol=1e-6)
        earned = np.asarray(episodes.step_rewards)[i]
        assert earned[2] == 0.25 and earned[10] == 0.5 and earned[17] == 1
        assert earned.sum() == episodes.rewards[i] == 1.75
    assert episodes.finish.tolist() == [STOP, STOP] and episodes.group.tolist() == [0, 0]
    assert not np.asarray(episodes.restarts).any()
    assert float(metrics["turns"].value) == 3 and float(metrics["finish/done"].value) == 1


def test_ids_are_not_encoded_again(pool: Pool) -> None:
    """No text encodes to id 0 or 4, so only the ids themselves can have come back (case 10)."""
    vocab = {"<u>": USER, "<a>": ASSISTANT, "<e>": END, "a": 5, "b": 6, "ab": 7, "w10": 10}
    backend = Backend(models.WordLevel(vocab | {"w12": 12}, unk_token="w10"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<u>", "<a>", "<e>")])
    tokenizer = Tokenizer(backend, None, (END,), 0, PLAIN)
    assert tokenizer.decode([5, 6]) == "a b" and tokenizer.encode("ab") == [7]
    words = Words([5, 6, END])
    run = dialogues(pool, tokenizer, SAMPLING, group=1, max_turns=2, max_context=40, sample=words)
    episodes, _ = run(jr.key(0), MODEL, tasks([0, 0, "done"]))
    _, tokens, _ = texts(episodes, 0)
    assert tokens == [5, 6, END, USER, 12, END, ASSISTANT, 5, 6, END]


def test_rewritten_history_gives_several_texts_of_one_episode(pool: Pool) -> None:
    """The model thinks w7, then says w8; its thought is gone from the next prompt."""
    words = Words([7, THINK, 8, END])
    run = collect(pool, words, template=FORGETS, group=2)
    episodes, _ = run(jr.key(0), MODEL, tasks([0, 1, "done"]))
    first = [USER, 10, END, ASSISTANT]
    second = [*first, 8, END, USER, 12, END, ASSISTANT]
    assert [p[0] for p in words.prompts] == [first, second]
    prompt, tokens, mask = texts(episodes, 0)
    assert prompt == first
    assert tokens == [7, THINK, 8, END, *second[4:], 7, THINK, 8, END]
    assert mask == [True] * 4 + [False] * 6 + [True] * 4
    assert np.flatnonzero(np.asarray(episodes.restarts)[0]).tolist() == [4]
    assert episodes.rewards.tolist() == [2.0, 2.0]
    rows, _ = to_rows(episodes)
    check_rows(rows)
    assert rows.tokens.shape[0] == 1
    counts = np.asarray(score(MODEL, rows).logps != 0).sum()
    assert counts == 16
    trunk = episodes.prompts.tokens.shape[1]
    positions = np.asarray(rows.positions)[0, trunk : trunk + 14]
    assert positions.tolist() == [4, 5, 6, 7, *range(4, 14)]


@pytest.mark.parametrize(
    ("script", "options", "finish", "turns", "reward"),
    [
        ([0, 1, 1, 1, 1], {"max_turns": 3}, MAX_TURNS, 3, 3),
        ([0, 1, 1, 1, 1], {"max_context": 16}, LENGTH, 2, 2),
        ([0, "raise"], {}, ERROR, 1, np.nan),
        (["nothing"], {}, ERROR, 0, np.nan),
        ([0, 1, "hang"], {}, TIMEOUT, 2, np.nan),
        ([0, 1, "megabyte"], {"max_context": 30}, LENGTH, 2, 1),
        ([0, 1, 2, "done"], {"discount": 0.5}, STOP, 3, 1 + 1 + 0.25),
    ],
)
def test_how_episodes_end(
    pool: Pool, script: list[Any], options: dict[str, Any], finish: int, turns: int, reward: float
) -> None:
    run = collect(pool, Words([7, 8, END]), **options)
    episodes, metrics = run(jr.key(0), MODEL, tasks(script, [0, "done"]))
    assert episodes.finish.tolist() == [finish] * 2 + [STOP] * 2
    np.testing.assert_allclose(episodes.rewards, [reward] * 2 + [1.0] * 2)
    assert float(metrics["turns"].value) == (turns + 1) / 2
    sampled = [3 * turns] * 2 + [3] * 2
    assert episodes.mask.sum(1).tolist() == sampled
    check_rows(to_rows(episodes)[0])


ACTS = st.sampled_from([0, 0.5, 1, "done", "raise", "none", "garbage", ("slow", 0.01)])


@given(
    st.lists(st.lists(ACTS, min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=8)
def test_no_group_is_lost_or_doubled_whatever_happens(
    scripts: list[list[Any]], group: int, hangs: bool
) -> None:
    """An episode is what its script says, wherever it stands and whatever the others do."""
    pool = Pool(Scripted, step_timeout=1.0, workers=3)
    ids = [10 * i + 3 for i in range(len(scripts))]
    scripts = [[*script, "done"] for script in scripts]
    if hangs:
        scripts[-1][1] = "hang"
    run = collect(pool, Words([7, END]), group=group, max_context=100)
    episodes, _ = run(jr.key(0), MODEL, tasks(*scripts, ids=ids))
    assert episodes.group.tolist() == [i for i in range(len(scripts)) for _ in range(group)]
    assert episodes.prompts.ids.tolist() == ids
    for i, script in enumerate(s for s in scripts for _ in range(group)):
        finish, total = MAX_TURNS, 0.0
        for turn, act in enumerate(script):
            match act:
                case "done" if turn:
                    finish, total = STOP, total + 1
                case "hang":
                    finish = TIMEOUT
                case "raise" | "none" | "garbage":
                    finish = ERROR
                case int() | float() if turn:
                    total += act
            if finish != MAX_TURNS:
                break
        assert int(episodes.finish[i]) == finish, script
        expected = np.nan if finish in (ERROR, TIMEOUT) else total
        np.testing.assert_allclose(float(episodes.rewards[i]), expected, err_msg=str(script))
    pool.close()


def test_nothing_depends_on_how_long_calls_take(pool: Pool) -> None:
    def run(delay: float) -> Episodes:
        script = [("slow", delay), ("slow", 2 * delay), "done"]
        made = collect(pool, Words([7, END], [8, END]))
        return made(jr.key(0), MODEL, tasks(script, [0, 1, ("slow", delay), "done"]))[0]

    assert_same_bits(run(0.0), run(0.05))


def test_the_sampler_is_asked_under_the_rollouts_own_ids(pool: Pool) -> None:
    seen: list[list[int]] = []

    class Named(Words):
        def __call__(self, key: KeyArray, model: Decoder, prompts: Prompts) -> Completions:
            seen.append(prompts.ids.tolist())
            return super().__call__(key, model, prompts)

    run = collect(pool, Named([7, END]), group=2)
    run(jr.key(0), MODEL, tasks([0, "done"], [0, 0, "done"], ids=[4, 9]))
    assert [ids[:4] for ids in seen] == [[8, 9, 18, 19], [18, 19, 0, 0]]


def test_real_turns_are_scored_as_they_were_drawn(pool: Pool) -> None:
    run = dialogues(pool, make_tokenizer(PLAIN), SAMPLING, group=2, max_turns=2, max_context=20)
    episodes, _ = run(jr.key(0), MODEL, tasks([0, 0, "done"]))
    rows, places = to_rows(episodes)
    found = score(MODEL, rows).logps
    np.testing.assert_allclose(places.per_token(episodes.logps), found, atol=2e-5)
    again, _ = run(jr.key(0), MODEL, tasks([0, 0, "done"]))
    assert_same_bits(again, episodes)


def test_what_cannot_be_is_an_error(pool: Pool) -> None:
    tokenizer = make_tokenizer(PLAIN)
    sizes: dict[str, Any] = {"group": 2, "max_turns": 2, "max_context": 20}
    for name, wrong in (("group", 0), ("max_turns", 0), ("max_context", 4)):
        given: dict[str, Any] = sizes | {name: wrong}
        with pytest.raises(ValueError, match=f"expected {name} of at least one turn"):
            dialogues(pool, tokenizer, SAMPLING, **given)
    with pytest.raises(ValueError, match="expected stop_ids that end a turn"):
        dialogues(pool, tokenizer, Sampling(max_tokens=4), **sizes)
    run = collect(pool, Words([7, END]))
    with pytest.raises(TypeError, match="cannot be fused"):
        jax.jit(lambda key: run(key, MODEL, tasks([0, "done"]))[0].rewards)(jr.key(0))
