"""Ids, groups and tokens that do not fit: an error, or nothing, but never another's value."""

import dataclasses

import jax.numpy as jnp
import pytest

from purepost.rollout.collect import Episodes, to_rows
from purepost.rollout.sample import pad_prompts
from purepost.rollout.stop import stop_strings


def test_every_prompt_has_an_id() -> None:
    """Too few ids would give two prompts the same random numbers, or fail deep inside."""
    with pytest.raises(ValueError, match="an id for each of 2 prompts, got 1"):
        pad_prompts([[1], [2]], ids=[7])


def test_groups_are_of_one_size() -> None:
    """Three episodes of two prompts are no two groups."""
    episodes = Episodes(
        prompts=pad_prompts([[1], [2]], width=2),
        group=jnp.array([0, 0, 1]),
        tokens=jnp.ones((3, 2), jnp.int32),
        lengths=jnp.full(3, 2),
        mask=jnp.ones((3, 2), bool),
        logps=jnp.zeros((3, 2)),
        rewards=jnp.zeros(3),
        finish=jnp.zeros(3, jnp.int32),
        temperature=jnp.ones(3),
    )
    with pytest.raises(ValueError, match="3 episodes of 2 prompts"):
        to_rows(episodes)
    two = dataclasses.replace(episodes, group=jnp.array([0, 1, 1]))
    with pytest.raises(ValueError, match="3 episodes of 2 prompts"):
        to_rows(two)


def test_an_id_beyond_the_vocabulary_matches_nothing() -> None:
    """The last token completes the string; an id past it does not stand for it."""
    stop = stop_strings(["ab"], [b"a", b"b"])
    matched, complete = stop.advance(jnp.array([[1], [1]]), jnp.array([1, 2]))
    assert matched.tolist() == [[2], [0]] and complete.tolist() == [True, False]
