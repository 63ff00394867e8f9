"""The experience buffer beside a list of groups in Python; what it brings is weighted, stale, and
after a kill the same.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.probes.sampled import END
from purepost import train
from purepost.advantages import group_normalized
from purepost.algorithms import grpo
from purepost.buffer import (
    Buffer,
    Groups,
    Replayed,
    add,
    by_age,
    by_variance,
    empty,
    evenly,
    join,
    newest,
    sample,
    within,
)
from purepost.checkpoint import journaled
from purepost.losses import tis
from purepost.models import WithReference
from purepost.policy_batch import annotate
from purepost.rollout.collect import Collect, Episodes, Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import pad_prompts
from purepost.rollout.stateful import in_memory
from tests.compare import assert_same_bits
from tests.environments.test_dialogues import MODEL


def episodes(*rewards: list[float], first: int = 1, width: int = 3) -> Episodes:
    """A group for each list of rewards, told by its tokens: first, first + 1, …"""
    p, g = len(rewards), len(rewards[0])
    tokens = np.repeat(np.arange(first, first + p, dtype=np.int32), g)
    n = jnp.zeros(p * g, jnp.int32)
    return Episodes(
        prompts=pad_prompts([[first + i] for i in range(p)], width=2 + width % 2),
        group=jnp.repeat(jnp.arange(p, dtype=jnp.int32), g),
        tokens=jnp.asarray(np.repeat(tokens[:, None], width, 1)),
        lengths=n + width,
        mask=jnp.ones((p * g, width), bool),
        logps=-jnp.ones((p * g, width)),
        rewards=jnp.asarray(np.asarray(rewards, np.float32).reshape(-1)),
        finish=n,
        temperature=jnp.ones(p * g),
    )


def names(buffer: Buffer) -> list[int]:
    """Which groups it holds."""
    size = buffer.episodes.group.shape[0] // buffer.added.shape[0]
    first = np.asarray(buffer.episodes.tokens)[::size, 0]
    prompts = np.asarray(buffer.episodes.prompts.tokens)[:, 0]
    there = np.asarray(buffer.added) >= 0
    assert (first[there] == prompts[there]).all()
    return sorted(first[there].tolist())


def later(buffer: Buffer) -> Buffer:
    return dataclasses.replace(buffer, now=buffer.now + 1)


def filled(*streams: Episodes, capacity: int = 8, **options: Any) -> Buffer:
    """A buffer after a step for each."""
    buffer = empty(streams[0], capacity)
    for stream in streams:
        buffer = later(add(buffer, stream, **options))
    return buffer


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=6), st.booleans())
@settings(max_examples=10)
def test_it_holds_what_a_list_would(steps: list[list[int]], by_worth: bool) -> None:
    """Of every step two groups; NaN groups never enter; the newest, or the most varied, stay."""
    buffer, kept = empty(episodes([0.0, 0.0], [0.0, 0.0]), 3), []
    for now, step in enumerate(steps):
        rewards = [[float("nan")] * 2 if x == 0 else [0.0, float(x)] for x in step]
        first = 10 * now + 1
        worth = by_variance() if by_worth else newest
        buffer = later(add(buffer, episodes(*rewards, first=first), worth=worth))
        kept += [(x if by_worth else now, first + i) for i, x in enumerate(step) if x]
        kept = sorted(kept, key=lambda group: group[0])[-3:] if len(kept) > 3 else kept
        kept = sorted(kept, key=lambda group: group[1])
        assert names(buffer) == [name for _, name in kept]
    assert int(buffer.now) == len(steps)


def test_groups_that_are_too_old_go() -> None:
    old, new = episodes([0.0, 1.0]), episodes([0.0, 1.0], first=5)
    assert names(filled(old, new, worth=within(1))) == [1, 5]
    assert names(filled(old, new, new, worth=within(1))) == [5, 5]
    stale = dataclasses.replace(new, staleness=jnp.asarray([0, 2], jnp.int32))
    assert names(filled(old, stale, worth=within(1))) == [1]


def test_sampled_episodes_say_how_stale_they_are() -> None:
    stream = dataclasses.replace(episodes([0.0, 1.0]), staleness=jnp.asarray([0, 2], jnp.int32))
    buffer = filled(stream, episodes([0.0, 1.0], first=4))
    found, after = sample(jr.key(0), buffer, 40)
    assert found.staleness is not None and found.weights is not None
    first, stale = found.tokens[::2, 0].tolist(), found.staleness.reshape(-1, 2).tolist()
    assert dict(zip(first, stale, strict=True)) == {1: [2, 4], 4: [1, 1]}
    assert found.group.tolist() == [i for i in range(40) for _ in range(2)]
    assert found.weights.tolist() == [1.0] * 80
    assert int(after.drawn.sum()) == 40


def test_priorities_are_the_frequencies_and_weights_undo_them() -> None:
    """Of groups whose variances are ¼, 1 and 4: P ∝ √variance; w = (3 P)^−1, so that any mean of
    the sampled groups is that of all.
    """
    stream = episodes([0.0, 1.0], [0.0, 2.0], [0.0, 4.0], [1.0, 1.0])
    buffer = filled(stream)
    options: dict[str, Any] = dict(priority=by_variance(), exponent=0.5, correction=1.0)
    found, _ = sample(jr.key(1), buffer, 4000, **options)
    counts = np.bincount(np.asarray(found.tokens[::2, 0]), minlength=5)[1:]
    p = np.array([0.5, 1, 2]) / 3.5
    np.testing.assert_allclose(counts / 4000, [*p, 0], atol=0.03)
    assert found.weights is not None
    first, each = found.tokens[::2, 0].tolist(), found.weights[::2].tolist()
    weights = dict(zip(first, each, strict=True))
    np.testing.assert_allclose([weights[i] for i in (1, 2, 3)], 1 / (3 * p), rtol=1e-5)


def test_priorities_by_hand() -> None:
    groups = Groups(
        age=jnp.asarray([0, 2, 5], jnp.int32),
        drawn=jnp.zeros(3, jnp.int32),
        rewards=jnp.asarray([[0.0, 2.0, jnp.nan], [1.0, 1.0, 1.0], [jnp.nan] * 3]),
        filled=jnp.ones(3, bool),
    )
    np.testing.assert_allclose(by_variance(0.5)(groups), [1.5, 0.5, 0.5])
    np.testing.assert_allclose(by_age(0.5)(groups), [1, 0.25, 1 / 32])
    np.testing.assert_allclose(evenly(groups), [1, 1, 1])
    np.testing.assert_allclose(within(2, evenly)(groups), [1, 1, 0])


def test_nothing_to_sample_counts_nothing() -> None:
    found, buffer = sample(jr.key(0), empty(episodes([0.0, 1.0]), 2), 3)
    assert np.isnan(found.rewards).all() and not np.asarray(found.mask).any()
    assert found.weights is not None and found.weights.tolist() == [0.0] * 6
    assert int(buffer.drawn.sum()) == 0


def test_streams_of_several_widths_are_one() -> None:
    narrow, wide = episodes([0.0, 1.0]), episodes([1.0, 0.0], [1.0, 1.0], first=7, width=6)
    joined = join(narrow, wide)
    assert joined.tokens.shape == (6, 6) and joined.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert joined.prompts.tokens[:, 0].tolist() == [1, 7, 8]
    assert joined.lengths.tolist() == [3, 3, 6, 6, 6, 6]
    assert names(add(filled(narrow), wide)) == [1, 7, 8]
    odd = dataclasses.replace(wide, baselines=jnp.zeros(4))
    with pytest.raises(ValueError, match=r"the same fields, got \['baselines'\] in some only"):
        join(narrow, odd)
    with pytest.raises(ValueError, match="groups of 2 episodes, got 3"):
        add(filled(narrow), episodes([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="expected capacity ≥ 1 group, got 0"):
        empty(narrow, 0)
    with pytest.raises(ValueError, match="expected max_staleness ≥ 0 steps, got -1"):
        within(-1)


def test_weights_count_in_a_loss() -> None:
    some = episodes([0.0, 1.0, 2.0], [3.0, 1.0, 0.0])
    weights = jnp.asarray([1.0, 2.0, 0.5, 1.0, 3.0, 0.0])
    weighted = dataclasses.replace(some, weights=weights)
    models = WithReference(MODEL)
    batch, _ = annotate(models, weighted, group_normalized)
    plain, _ = annotate(models, some, group_normalized)
    np.testing.assert_array_equal(batch.weights, weights.reshape(2, 3))
    np.testing.assert_array_equal(batch.advantages, plain.advantages)


def reward(tasks: Tasks, completions: Any) -> Any:
    return (completions.tokens == 7).sum(-1).astype(jnp.float32), {}


OPTIONS: dict[str, Any] = dict(capacity=4, groups=1, priority=by_age(0.5), worth=within(2))
FRESH = single_turn(reward, Sampling(4, stop_ids=(END,)), group=4)
AT_WORK: list[Collect] = []  # what the algorithm collects with at the moment
ALGORITHM = grpo(
    optax.adam(1e-2), lambda key, model, tasks: AT_WORK[-1](key, model, tasks), correction=tis()
)


def run(collect: Collect, start: Any, steps: int) -> list[Any]:
    """States after each step from a state on."""
    AT_WORK.append(collect)
    start = ALGORITHM.init(jr.key(0), WithReference(MODEL)) if start is None else start
    data = lambda i: Tasks(pad_prompts([[5, 6 + i % 3], [8]], width=2))  # noqa: E731
    states = []
    for _, state, metrics in train(ALGORITHM, start, data, key=jr.key(5), steps=steps):
        states.append((jax.tree.map(np.array, state), metrics))
    return states


def test_a_run_that_is_killed_and_resumed_is_the_run_never_stopped(tmp_path: Path) -> None:
    """It had collected two steps more than the state that it is resumed from."""
    whole = run(in_memory(Replayed(FRESH, **OPTIONS)), None, 6)
    assert float(whole[-1][1]["buffer/max_staleness"].value) > 0
    begun = run(journaled(Replayed(FRESH, **OPTIONS), tmp_path, keep=4), None, 4)
    assert_same_bits(begun[-1], whole[3])
    state = jax.tree.map(jnp.asarray, begun[1][0])
    (tmp_path / "00000004-00.part").write_bytes(b"cut off")
    resumed = run(journaled(Replayed(FRESH, **OPTIONS), tmp_path, keep=4), state, 6)
    for one, other in zip(resumed, whole[2:], strict=True):
        assert_same_bits(one, other)
    assert len(list(tmp_path.glob("*.npz"))) == 4
    with pytest.raises(ValueError, match="expected keep ≥ 1, got 0"):
        journaled(Replayed(FRESH, **OPTIONS), tmp_path, keep=0)


def test_steps_out_of_order_are_an_error(tmp_path: Path) -> None:
    collect = journaled(Replayed(FRESH, **OPTIONS), tmp_path, keep=9)
    tasks = Tasks(pad_prompts([[5, 6], [8]], width=2))
    for step in (0, 1):
        collect(jr.key(step), MODEL, tasks)
    with pytest.raises(ValueError, match="after number 1 of the journal in .*, got number 0"):
        collect(jr.key(0), MODEL, tasks)
