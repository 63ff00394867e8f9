"""Rollouts that go on over several steps: what they would have been in one, but for new weights;
whatever the schedule, no group is lost or comes twice.
"""

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purepost.checkpoint import journaled
from purepost.checkpoint.journal import decode, encode
from purepost.environments.guess import guess
from purepost.models import Decoder
from purepost.rollout.asynchronous import asynchronous, hosted
from purepost.rollout.collect import Episodes, Tasks, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.partial import Backlog, PartialRollouts
from purepost.rollout.sample import pad_prompts
from purepost.rollout.score import score
from purepost.rollout.stateful import in_memory
from tests.compare import assert_same_bits
from tests.rollout.stubs import Drawing, clockwork, moody

SAMPLING = Sampling(3, stop_ids=(1,))
RULES: dict[str, Any] = dict(group=2, max_turns=3, max_tokens=14)
ENV = hosted(guess(4, first_id=4, higher_id=2, lower_id=3), width=3)
LIMITS = Limits(slots=4, room=64, steps=3, chunk=16)


def tasks(step: int) -> Tasks:
    ids = [10 * step + 1, 10 * step + 2]
    return Tasks(pad_prompts([[9, 5], [6 + step % 3]], ids=ids, width=4))


def key(step: int) -> Any:
    return jr.fold_in(jr.key(3), step)


Found = dict[int, list[tuple[Any, ...]]]


def found(*steps: Episodes) -> Found:
    """By the task's id: what its episodes hold."""
    groups: Found = {}
    for episodes in steps:
        size = len(episodes.group) // len(episodes.prompts.ids)
        for i, n in enumerate(episodes.lengths.tolist()):
            id = int(episodes.prompts.ids[i // size])
            if id:  # no filler
                of = (episodes.tokens, episodes.mask, episodes.step_rewards)
                row = tuple(tuple(np.asarray(x)[i, :n].tolist()) for x in of if x is not None)
                end = (float(episodes.rewards[i]), int(episodes.finish[i]))
                groups.setdefault(id, []).append((*row, str(end)))
    return groups


def run(
    collect: PartialRollouts, models: list[Decoder], carried: Backlog, first: int = 0
) -> tuple[list[Episodes], list[Backlog]]:
    """Steps, one for each model."""
    steps, backlogs = [], []
    for step, model in enumerate(models, first):
        episodes, _, carried = collect(key(step), model, tasks(step), carried)
        steps.append(episodes)
        backlogs.append(carried)
    return steps, backlogs


@pytest.fixture(scope="module")
def models(model: Decoder) -> list[Decoder]:
    """Of six steps."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    return [
        eqx.combine(jax.tree.map(lambda x, s=s: x * (1 + 0.1 * s), arrays), rest) for s in range(6)
    ]


def test_what_goes_on_is_what_would_have_been(model: Decoder) -> None:
    """With weights that stay, parts make the whole."""
    engine = Engine(model, LIMITS)
    whole = asynchronous(engine, ENV, SAMPLING, **RULES)
    want = found(*(whole(key(step), model, tasks(step))[0] for step in range(3)))
    collect = PartialRollouts(engine, ENV, SAMPLING, groups=3, budget=2, **RULES)
    steps, backlogs = run(collect, [model] * 8, collect.start())
    got = found(*steps)
    assert {id: got[id] for id in want} == want
    assert max(int(e.staleness.max()) for e in steps if e.staleness is not None) >= 2
    assert len(backlogs[0].groups) == 2 and not np.isfinite(steps[0].rewards).any()
    collect.close()


def test_each_token_has_the_logp_of_the_weights_that_drew_it(models: list[Decoder]) -> None:
    engine = Engine(models[0], LIMITS)
    collect = PartialRollouts(engine, ENV, SAMPLING, groups=3, budget=2, **RULES)
    steps, _ = run(collect, models, collect.start())
    collect.close()
    mixed, scored = 0, eqx.filter_jit(lambda m, rows: score(m, rows).logps)
    for now, episodes in enumerate(steps):
        rows, places = to_rows(episodes)
        drawn = np.asarray(places.per_token(episodes.logps))
        by = np.stack([np.asarray(scored(m, rows)) for m in models])
        versions, mask = episodes.versions, np.asarray(rows.mask)
        assert versions is not None and episodes.staleness is not None
        version = np.asarray(places.per_token(versions))
        expected = np.take_along_axis(by, version[None], 0)[0]
        np.testing.assert_allclose(drawn[mask], expected[mask], atol=2e-5)
        spans = np.where(np.asarray(episodes.mask), np.asarray(versions), now)
        np.testing.assert_array_equal(episodes.staleness, now - spans.min(1))
        mixed += int((spans.min(1) < spans.max(1)).sum())
    assert mixed > 4


def test_a_run_that_is_resumed_goes_on_bit_by_bit(models: list[Decoder]) -> None:
    """With what is carried through a file's bytes, another engine, and environments played anew."""

    def collector() -> PartialRollouts:
        engine = Engine(models[0], LIMITS)
        return PartialRollouts(engine, ENV, SAMPLING, groups=2, budget=2, **RULES)

    first = collector()
    steps, backlogs = run(first, models, first.start())
    first.close()
    second = collector()
    carried = decode(encode(backlogs[2]))
    assert encode(carried) == encode(backlogs[2])
    again, after = run(second, models[3:], carried, 3)
    second.close()
    assert any(turn.tokens and not turn.over for turn in _turns(carried))
    for one, other in zip(again, steps[3:], strict=True):
        assert_same_bits(one, other)
    assert encode(after[-1]) == encode(backlogs[-1])


def _turns(backlog: Backlog) -> list[Any]:
    return [t for group in backlog.groups for e in group.episodes for t in e.script.turns]


@given(st.integers(0, 2**16), st.booleans(), st.sampled_from([None, 3, 7]), st.integers(0, 4))
@settings(max_examples=5)
def test_no_schedule_loses_a_group_or_brings_it_twice(
    model: Decoder, seed: int, deterministic: bool, budget: int | None, killed: int
) -> None:
    """Two tasks a step, room for three: all come back, as they would have been at once, though the
    process is killed after a step, environments fail and hang, and time is drawn anew.
    """
    rng, engine = np.random.default_rng(seed), Drawing()
    options: dict[str, Any] = {**RULES, "turn_seconds": 5.0, "retries": seed % 2}
    whole, alone = asynchronous(engine, moody(rng), SAMPLING, **options), []
    for step in range(4):
        with clockwork(engine):
            alone.append(whole(key(step), model, tasks(step))[0])
    want = found(*alone)
    options |= dict(groups=3, budget=budget, deterministic=deterministic)
    steps, carried = [], Backlog()
    log: list[int] = []
    for lives in (range(killed + 1), range(killed + 1, 10)):
        collect = PartialRollouts(engine, moody(rng, log), SAMPLING, **options)
        with clockwork(engine):
            for step in lives:
                before = len(carried.groups)
                episodes, metrics, carried = collect(key(step), model, tasks(step), carried)
                come = 3 - int(metrics["partial/filler"].value)
                assert len(carried.groups) == before + 2 - come
                steps.append(episodes)
            collect.close()
        carried = decode(encode(carried))
        assert sum(log) == 0 and len(set(log)) == len(log)  # every game is closed, once
        log.clear()
    got = found(*steps)
    assert {id: got[id] for id in want} == want
    assert all(len(group) == 2 for group in got.values())
    assert not engine.open


def test_a_kill_in_mid_step_is_a_step_anew(model: Decoder, tmp_path: Path) -> None:
    """The journal has what was carried into it, and nothing of it."""

    class Dying(Drawing):
        dies = 10**9

        def step(self) -> list[Any]:
            if self.rounds >= self.dies:
                raise MemoryError("killed")
            return Drawing.step(self)

    def collector(engine: Drawing) -> PartialRollouts:
        return PartialRollouts(engine, ENV, SAMPLING, groups=2, budget=2, **RULES)

    engine, steps = Dying(), range(6)
    partial = collector(engine)
    whole = in_memory(partial)
    want = [whole(key(step), model, tasks(step)) for step in steps]
    partial.close()
    engine.dies, alive = engine.rounds + 3, 0
    partial = collector(engine)
    collect = journaled(partial, tmp_path, keep=9)
    with pytest.raises(MemoryError):
        for alive in steps:
            collect(key(alive), model, tasks(alive))
    partial.close()
    assert 0 < alive < 5 and not engine.open
    engine.dies = 10**9
    partial = collector(engine)
    collect = journaled(partial, tmp_path, keep=9)
    for step in steps:
        assert_same_bits(collect(key(step), model, tasks(step)), want[step])
    partial.close()


def test_what_is_too_old_is_dropped_and_counted(model: Decoder) -> None:
    engine = Drawing()
    collect = PartialRollouts(
        engine, ENV, SAMPLING, groups=1, budget=1, max_staleness=3, **{**RULES, "group": 1}
    )
    carried, dropped, came = collect.start(), 0, 0
    for step in range(8):
        episodes, metrics, carried = collect(key(step), model, tasks(step), carried)
        dropped += int(metrics["partial/dropped"].value)
        came += 1 - int(metrics["partial/filler"].value)
        assert int(metrics["partial/carried"].value) == len(carried.groups)
        assert all(carried.step - group.born <= 3 for group in carried.groups)
        assert episodes.staleness is not None and int(episodes.staleness.max()) <= 3
    assert dropped and came and dropped + came + len(carried.groups) == 16
    collect.close()


def test_a_state_of_the_past_can_be_gone_on_with(model: Decoder) -> None:
    """What is carried in stays as it is."""
    engine = Drawing()
    collect = PartialRollouts(engine, ENV, SAMPLING, groups=2, budget=2, **RULES)
    _, backlogs = run(collect, [model] * 3, collect.start())
    before = encode(backlogs[0])
    first, _, _ = collect(key(1), model, tasks(1), backlogs[0])
    again, _, _ = collect(key(1), model, tasks(1), backlogs[0])
    assert_same_bits(first, again)
    assert encode(backlogs[0]) == before
    collect.close()


def test_an_environment_that_does_not_repeat_itself_has_failed(model: Decoder) -> None:
    """Its process was lost; played again, it says something else."""
    calls = iter(range(100))

    async def step(key: Any, state: Any, action: list[int]) -> Any:
        return state, [2 + next(calls) % 7], 0.0, False

    engine = Drawing()
    env = dataclasses.replace(ENV, step=step)
    options: dict[str, Any] = {**RULES, "groups": 2, "budget": 4}
    collect = PartialRollouts(engine, env, SAMPLING, **options)
    _, _, carried = collect(key(0), model, tasks(0), collect.start())
    assert any(turn.answer is not None for turn in _turns(carried))
    collect.close()
    other = PartialRollouts(engine, env, SAMPLING, **options)
    episodes, metrics, _ = other(key(1), model, tasks(1), carried)
    assert float(metrics["finish/error"].value) > 0
    assert np.isnan(episodes.rewards).any()
    other.close()


def test_numbers_out_of_range_are_errors(model: Decoder) -> None:
    for name, wrong in {"groups": 0, "budget": 0, "max_staleness": -1, "retries": -1}.items():
        given: dict[str, Any] = {**RULES, "groups": 1, name: wrong}
        with pytest.raises(ValueError, match=f"expected {name} ≥"):
            PartialRollouts(Drawing(), ENV, SAMPLING, **given)
