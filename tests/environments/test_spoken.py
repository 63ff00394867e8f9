"""Python games behind the asynchronous collector: what `dialogues` plays, each at its own pace."""

import threading
from typing import Any

import jax.random as jr
import numpy as np
import pytest

from purepost.checkpoint.journal import decode, encode
from purepost.environments.dialogues import dialogues
from purepost.environments.host import Pool
from purepost.environments.spoken import spoken
from purepost.rollout.asynchronous import asynchronous
from purepost.rollout.collect import Episodes, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.environment import ERROR, MAX_TURNS, TIMEOUT
from purepost.rollout.partial import Backlog, PartialRollouts
from purepost.rollout.sample import LENGTH, STOP
from purepost.types import check_rows
from tests.environments.scripted import Scripted
from tests.environments.test_dialogues import END, MODEL, PLAIN, make_tokenizer, tasks

# All but the last word of a turn is gone from the next prompt.
LAST_WORD = PLAIN.replace("m.content }}", "m.content.split(' ')[-1] }}")
GREEDY = Sampling(max_tokens=4, stop_ids=(END,), temperature=0.0)
SCRIPTS = [
    [0, 0.5, 0.25, "done"],
    [0, 1, 1, 1, 1],
    [0, "raise"],
    ["nothing"],
    [("slow", 0.02), ("slow", 0.02), 1, "done"],
    [0, 1, "hang"],
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL, Limits(slots=4, room=64, steps=4, chunk=16))


def texts(episodes: Episodes) -> list[tuple[list[int], list[int], list[bool], list[bool]]]:
    """Of each rollout: its prompt, what stands behind it, what was sampled, where it restarts."""
    found = []
    for i, n in enumerate(episodes.lengths.tolist()):
        group = int(episodes.group[i])
        prompt = episodes.prompts.tokens[group, : int(episodes.prompts.lengths[group])].tolist()
        of = (episodes.tokens, episodes.mask, episodes.restarts)
        found.append((prompt, *(np.asarray(x)[i, :n].tolist() for x in of)))
    return found


@pytest.mark.parametrize("template", [PLAIN, LAST_WORD])
def test_it_plays_what_dialogues_plays(engine: Engine, template: str) -> None:
    pool = Pool(Scripted, step_timeout=1.0, workers=32)
    tokenizer, todo = make_tokenizer(template), tasks(*SCRIPTS, ids=[3, 1, 4, 5, 9, 2])
    options: dict[str, Any] = dict(group=2, max_turns=4, discount=0.5)
    in_step = dialogues(pool, tokenizer, GREEDY, max_context=64, **options)
    each = asynchronous(engine, spoken(pool, tokenizer), GREEDY, max_tokens=48, **options)
    (want, _), (got, metrics) = (c(jr.key(0), MODEL, todo) for c in (in_step, each))
    assert texts(got) == texts(want)
    rewritten = bool(np.asarray(got.restarts).any())
    assert rewritten == (template == LAST_WORD)
    for name in ("group", "finish", "rewards"):
        np.testing.assert_array_equal(vars(got)[name], vars(want)[name], err_msg=name)
    width = min(x.tokens.shape[1] for x in (want, got))
    for name in ("logps", "step_rewards"):
        mine, theirs = (np.asarray(vars(x)[name])[:, :width] for x in (got, want))
        np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=name)
    ends = [STOP, MAX_TURNS, ERROR, ERROR, STOP, TIMEOUT]
    assert got.finish.tolist() == [end for end in ends for _ in range(2)]
    assert float(metrics["attempts"].value) == 1
    check_rows(to_rows(got)[0])
    assert engine.pending == 0
    pool.close()


def test_nobody_waits_for_a_slow_environment(engine: Engine) -> None:
    """It answers once all others are done."""
    others = threading.Semaphore(0)

    class Waits(Scripted):
        def step(self, action: str) -> Any:
            if self.script == ["patient", "done"]:
                self.script.pop(0)
                for _ in range(6):
                    others.acquire()
            answer = Scripted.step(self, action)
            if answer[2]:
                others.release()
            return answer

    pool = Pool(Waits, step_timeout=20.0)
    collect = asynchronous(
        engine, spoken(pool, make_tokenizer(PLAIN)), GREEDY, group=1, max_turns=5, max_tokens=40
    )
    todo = tasks([0, "patient", "done"], *[[0, 0, 0, "done"]] * 6)
    episodes, _ = collect(jr.key(0), MODEL, todo)
    assert episodes.finish.tolist() == [STOP] * 7
    pool.close()


def test_an_episode_that_fails_is_played_again_in_its_place(engine: Engine) -> None:
    """Twice in vain where the script says so; what it brings then is as if it never failed."""
    lock, failures = threading.Lock(), {"a": 2, "b": 9}

    class Flaky(Scripted):
        def reset(self, task: dict[str, Any], seed: int) -> Any:
            self.name = task["name"]
            return Scripted.reset(self, task, seed)

        def step(self, action: str) -> Any:
            with lock:
                if self.turn == 1 and failures.get(self.name, 0):
                    failures[self.name] -= 1
                    raise ConnectionError("flaky")
            return Scripted.step(self, action)

    pool = Pool(Flaky)
    env = spoken(pool, make_tokenizer(PLAIN))
    todo = tasks(*[[0, 1, "done"]] * 3, ids=[3, 8, 5])
    todo.columns["name"] = ["a", "b", "c"]
    sampling = Sampling(max_tokens=4, stop_ids=(END,))
    options: dict[str, Any] = dict(group=2, max_turns=4, max_tokens=40, retries=2)
    collect = asynchronous(engine, env, sampling, **options)
    got, metrics = collect(jr.key(0), MODEL, todo)
    assert got.finish.tolist() == [STOP, STOP, ERROR, ERROR, STOP, STOP]
    assert float(metrics["attempts"].value) == pytest.approx((4 + 6 + 2) / 6)
    failures.clear()
    want, _ = collect(jr.key(0), MODEL, todo)
    assert [texts(got)[i] for i in (0, 1, 4, 5)] == [texts(want)[i] for i in (0, 1, 4, 5)]
    assert np.asarray(want.finish).tolist() == [STOP] * 6
    pool.close()


def test_a_prompt_without_room_costs_its_episode(engine: Engine) -> None:
    pool = Pool(Scripted)
    env = spoken(pool, make_tokenizer(PLAIN))
    collect = asynchronous(engine, env, GREEDY, group=1, max_turns=3, max_tokens=40)
    todo = tasks(["megabyte"], [0, 1, "megabyte"], [0, "done"])
    episodes, _ = collect(jr.key(0), MODEL, todo)
    assert episodes.finish.tolist() == [LENGTH, LENGTH, STOP]
    assert episodes.rewards.tolist() == [0.0, 1.0, 1.0]
    assert episodes.prompts.tokens.shape[1] == 32
    pool.close()


def test_games_go_on_over_several_steps_and_in_another_process(engine: Engine) -> None:
    """Rewritten histories too; all is as it would have been at once."""
    tokenizer = make_tokenizer(LAST_WORD)
    sampling = Sampling(max_tokens=4, stop_ids=(END,))
    rules: dict[str, Any] = dict(group=2, max_turns=4, max_tokens=40)
    todo = tasks([0, 1, 0.5, "done"], [0, 0.25, 1, 1, 1], ids=[3, 8])
    pool = Pool(Scripted)
    env = spoken(pool, tokenizer)
    want, _ = asynchronous(engine, env, sampling, **rules)(jr.key(0), MODEL, todo)
    assert np.asarray(want.restarts).any()
    carried, found = Backlog(), {}
    for life in range(3):
        collect = PartialRollouts(engine, env, sampling, groups=2, budget=3, **rules)
        for step in range(3 * life, 3 * life + 3):
            more = tasks(["nothing"]) if step else todo
            episodes, _, carried = collect(jr.key(step), MODEL, more, decode(encode(carried)))
            for i, id in enumerate(episodes.prompts.ids.tolist()):
                if id:
                    both = slice(2 * i, 2 * i + 2)
                    found[id] = texts(episodes)[both], episodes.rewards[both]
        collect.close()
    for i, id in enumerate((3, 8)):
        assert found[id][0] == texts(want)[2 * i : 2 * i + 2]
        np.testing.assert_array_equal(found[id][1], want.rewards[2 * i : 2 * i + 2])
    pool.close()
