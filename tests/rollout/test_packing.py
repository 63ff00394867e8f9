"""Packed rows: the same trees, closer; what each token sees, by brute force."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.algorithms import grpo, on_policy_distillation, ppo
from purepost.losses import prompt_mean
from purepost.models import real_tokens
from purepost.rollout.collect import Episodes, single_turn, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.packing import Packed, pack_rows, padding_share
from purepost.rollout.sample import pad_prompts
from purepost.types import Rows, check_rows


def made(prompts: list[int], lengths: list[int], room: int, restarts: bool = False) -> Episodes:
    """Episodes of prompts of these lengths, whose every token has an id of its own."""
    n, p = len(lengths), len(prompts)
    real = np.arange(room) < np.asarray(lengths)[:, None]
    tokens = np.where(real, 100 + np.arange(n * room).reshape(n, room), 0)
    first = iter(range(1, 100))
    begins = real & (np.arange(room) == 1) if restarts else None
    return Episodes(
        prompts=pad_prompts([[next(first) for _ in range(k)] for k in prompts], width=8),
        group=jnp.asarray(np.arange(n) % p, jnp.int32),
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        mask=jnp.asarray(real),
        logps=jnp.asarray(-tokens / 100, jnp.float32),
        rewards=jnp.arange(n, dtype=jnp.float32),
        finish=jnp.zeros(n, jnp.int32),
        temperature=jnp.full(n, 0.5),
        restarts=None if begins is None else jnp.asarray(begins),
    )


def contexts(rows: Rows) -> dict[int, tuple[Any, ...]]:
    """Of every real token (they are all different): what it sees, the token before it, its depth,
    whether it is trained.
    """
    real = np.asarray(real_tokens(rows))
    tokens, end, parent, positions, mask = (
        np.asarray(x) for x in (rows.tokens, rows.end, rows.parent, rows.positions, rows.mask)
    )
    found = {}
    for b, i in zip(*np.nonzero(real), strict=True):
        seen = [int(tokens[b, j]) for j in range(i + 1) if i < end[b, j] or i == j]
        before = int(tokens[b, parent[b, i]])
        found[int(tokens[b, i])] = (seen, before, int(positions[b, i]), bool(mask[b, i]))
    return found


@given(
    prompts=st.lists(st.integers(2, 8), min_size=3, max_size=3),
    lengths=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    restarts=st.booleans(),
    multiple=st.integers(1, 3),
)
def test_every_token_sees_what_it_saw(
    prompts: list[int], lengths: list[int], restarts: bool, multiple: int
) -> None:
    n = len(lengths)
    episodes = made(prompts, lengths, 6, restarts)
    plain, _ = to_rows(episodes)
    rows, places = Packed(multiple=multiple)(episodes)
    check_rows(rows)
    assert contexts(rows) == contexts(plain)
    assert rows.tokens.shape[0] % multiple == 0
    # Every episode is somewhere once, with its own number and its own tokens.
    here = np.asarray(places.episodes)
    assert sorted(here[here < n].tolist()) == list(range(n))
    episode, tokens = np.asarray(rows.episode), np.asarray(rows.tokens)
    logps = np.asarray(places.per_token(episodes.logps))
    for b, i in zip(*np.nonzero(np.asarray(rows.mask)), strict=True):
        owner = here[b, episode[b, i]]
        assert tokens[b, i] in np.asarray(episodes.tokens[owner])
        np.testing.assert_allclose(logps[b, i], -tokens[b, i] / 100, rtol=1e-6)
    assert not logps[~np.asarray(rows.mask)].any()


def test_what_is_empty_goes() -> None:
    """Two groups of 4 with room for 60 tokens each, of which 1 to 4 are used: one row of 32."""
    episodes = made([3, 2], [3, 1, 2, 4, 4, 1, 2, 3], 60)
    plain, _ = to_rows(episodes)
    packed = Packed()
    rows, places = packed(episodes)
    assert plain.tokens.shape == (2, 248) and rows.tokens.shape == (1, 32)
    assert float(padding_share(plain)) == pytest.approx(1 - 25 / 496)
    assert float(padding_share(rows)) == pytest.approx(1 - 25 / 32)
    assert (rows.most_trained, rows.episodes) == (32, 8)
    assert places.per_episode(episodes.rewards).sum() == 28
    assert places.per_row(episodes.temperature).tolist() == [0.5]


def test_few_shapes_over_many_batches() -> None:
    """Completions of 1 to 60 tokens, 64 batches: a handful of programs, each shape counted once."""
    draw, packed = np.random.default_rng(0), Packed()
    for _ in range(64):
        packed(made([4, 5], draw.integers(1, 60, 8).tolist(), 60))
    assert 2 <= len(packed.shapes) <= 16


def test_a_group_longer_than_the_row_repeats_its_prompt() -> None:
    episodes = made([8], [6, 6, 6, 6], 6)
    rows, places = Packed(width=20)(episodes)
    assert rows.tokens.shape == (2, 20)
    assert [set(row[row < 4].tolist()) for row in np.asarray(places.episodes)] == [{0, 1}, {2, 3}]
    assert rows.tokens[:, :8].tolist() == [list(range(1, 9))] * 2
    with pytest.raises(ValueError, match="at most 13 tokens together, got 14; widen the rows"):
        Packed(width=13)(episodes)


def test_rows_that_are_given_are_packed_too() -> None:
    plain, _ = to_rows(made([2, 3, 4], [1, 2, 3], 5))
    rows, moves = pack_rows(plain)
    assert rows.tokens.shape == (1, 32) and contexts(rows) == contexts(plain)
    assert moves.episodes[0].tolist() == [[2, 1, 0]]
    empty = jax.tree.map(jnp.zeros_like, plain)
    assert pack_rows(empty)[0].tokens.shape == (1, 32)


def test_what_cannot_be_packed() -> None:
    episodes = made([2], [1, 2], 3)
    mixed = Episodes(**{**vars(episodes), "temperature": jnp.asarray([1.0, 0.5])})
    with pytest.raises(ValueError, match="one temperature"):
        Packed()(mixed)
    with pytest.raises(ValueError, match="expected multiple ≥ 1, got 0"):
        Packed(multiple=0)
    collect = single_turn(lambda t, c: (c.lengths.astype(jnp.float32), {}), Sampling(2), group=2)
    for factory in (grpo, ppo, on_policy_distillation):
        with pytest.raises(ValueError, match="prompt_mean takes a row for a prompt's whole group"):
            factory(optax.sgd(0.1), collect, aggregate=prompt_mean, lay=Packed())
