"""Rows decoded side by side give what a forward pass over each gives, however they are cut."""

import dataclasses
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder, init_decoder
from purepost.models.cache import unstack
from purepost.models.hub import load
from purepost.models.slots import Slots, empty_slots, extend, read_slot, resize, write_slot
from purepost.types import causal_rows
from tests.compare import assert_same_bits

GOLDEN = Path(__file__).parents[1] / "golden"
# Windows and soft-caps; two RoPEs, norms, layers that differ and read each other's keys.
FAMILIES = ["gemma2", "gemma4_text"]
ROOM, LENGTHS = 32, (29, 8, 18)
# Tokens of each row in each piece: prompts in pieces, then one by one, then several at once; a row
# may have none.
PIECES = [
    [(9, 5, 0), (9, 0, 9), (0, 1, 2)],
    [(1, 1, 1), (1, 1, 1), (1, 0, 0)],
    [(4, 0, 3), (4, 0, 2)],
]


@cache
def family(name: str) -> Decoder:
    return load(GOLDEN / name).model


@eqx.filter_jit
def more(
    model: Decoder, slots: Slots, tokens: jax.Array, start: jax.Array
) -> tuple[jax.Array, Slots]:
    return extend(model, unstack(model), slots, tokens, start)


def token_rows() -> np.ndarray:
    return np.random.default_rng(3).integers(1, 19, (3, ROOM)).astype(np.int32)


def in_pieces(model: Decoder, slots: Slots) -> tuple[np.ndarray, Slots]:
    """Hidden states of every row, piece by piece; what fills the pieces up is nonsense."""
    rows, done = token_rows(), np.zeros(3, np.int32)
    out = np.full((3, ROOM, model.config.hidden_size), np.nan, np.float32)
    for pieces in PIECES:
        width = max(map(max, pieces))
        for counts in pieces:
            tokens = np.full((3, width), 7, np.int32)
            for i, n in enumerate(counts):
                tokens[i, :n] = rows[i, done[i] : done[i] + n]
            start = np.where(counts, done, slots.room).astype(np.int32)
            hidden, slots = more(model, slots, jnp.asarray(tokens), jnp.asarray(start))
            for i, n in enumerate(counts):
                out[i, done[i] : done[i] + n] = hidden[i, :n]
            done += np.asarray(counts, np.int32)
    assert tuple(done) == LENGTHS
    return out, slots


def at_once(model: Decoder) -> np.ndarray:
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    return np.asarray(eqx.filter_jit(model)(causal_rows(jnp.asarray(token_rows()), lengths))[0])


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.concatenate([np.abs(got[i, :n] - want[i, :n]).max(-1) for i, n in enumerate(LENGTHS)])


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_give_the_hidden_states_of_the_whole(name: str) -> None:
    """Past the window of 12 too."""
    model = family(name)
    got, _ = in_pieces(model, empty_slots(model.config, 3, ROOM, jnp.float32))
    assert errors(got, at_once(model)).max() < 1e-4


def test_as_many_key_heads_as_query_heads(model: Decoder) -> None:
    config = dataclasses.replace(model.config, num_kv_heads=4)
    other = init_decoder(jr.key(0), config)
    got, _ = in_pieces(other, empty_slots(config, 3, ROOM, jnp.float32))
    assert errors(got, at_once(other)).max() < 1e-5


def test_what_fills_a_slot_up_is_never_seen(model: Decoder) -> None:
    """Slots full of numbers give the same bits as empty ones."""
    empty = empty_slots(model.config, 3, ROOM, jnp.float32)
    dirty = jax.tree.map(lambda x: x + 1e3, empty)
    np.testing.assert_array_equal(in_pieces(model, dirty)[0], in_pieces(model, empty)[0])


def test_a_row_that_starts_at_the_room_writes_nothing(model: Decoder) -> None:
    _, slots = in_pieces(model, empty_slots(model.config, 3, ROOM, jnp.float32))
    start = jnp.asarray([ROOM, 3, ROOM], jnp.int32)
    _, after = more(model, slots, jnp.full((3, 4), 5, jnp.int32), start)
    keep = lambda x: jax.tree.map(lambda y: y[jnp.array([0, 2])], x)  # noqa: E731
    assert_same_bits(keep(after), keep(slots))
    assert not np.array_equal(after.layers[0].k[1], slots.layers[0].k[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_slot_moves_to_another(model: Decoder, dtype: jax.typing.DTypeLike) -> None:
    """Through larger and smaller rooms, without a change to what it holds or to the others."""
    _, slots = in_pieces(model, empty_slots(model.config, 3, ROOM, dtype))
    wide = resize(slots, 2 * ROOM)
    part = read_slot(wide, jnp.asarray(0), ROOM)
    moved = resize(write_slot(wide, jnp.asarray(2), part), ROOM)
    order = jnp.array([0, 1, 0])
    assert_same_bits(moved, jax.tree.map(lambda x: x[order], slots))


def test_int8_is_near_and_a_quarter_of_the_size(model: Decoder) -> None:
    """Each key and value is within half a step of what it was: 1/254 of its head's largest."""
    full = empty_slots(model.config, 3, ROOM, jnp.float32)
    small = empty_slots(model.config, 3, ROOM, jnp.int8)
    got, small = in_pieces(model, small)
    want, full = in_pieces(model, full)
    assert 0 < errors(got, want).max() < 0.1
    first, layer = full.layers[0], small.layers[0]
    assert layer.k_scale is not None
    k = np.asarray(layer.k, np.float32) * np.asarray(layer.k_scale)[:, :, None]
    largest = np.abs(np.asarray(first.k)).max(2, keepdims=True)
    assert (np.abs(k - first.k) <= largest / 254 + 1e-6).all()
    assert layer.k.nbytes * 4 == first.k.nbytes
