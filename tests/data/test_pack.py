"""Packing wastes little, rows are forests, and a document scores in a row as it does alone."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.data import padding_share
from purepost.data.examples import Tokens, Tree
from purepost.data.pack import lay
from purepost.models import Config, Decoder, init_decoder
from purepost.rollout.packing import best_fit
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows, check_rows, group_rows


@pytest.fixture(scope="session")
def model() -> Decoder:
    """One layer over 19 tokens, with random weights."""
    config = Config(19, 10, 14, 1, 4, 2, 6, rope_theta=100.0, max_positions=64)
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), jnp.float32), shapes)


def twin(sizes: Sequence[int], width: int) -> list[int]:
    """How full the rows are, ascending: every row looked at for every example."""
    full: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [x for x in full if x + size <= width]
        if fitting:
            full.remove(max(fitting))
        full.append(size + max(fitting, default=0))
    return sorted(full)


def test_best_fit_by_hand() -> None:
    sizes = [5, 7, 5, 2, 4, 2, 5, 1, 6]
    packs = [[sizes[i] for i in pack] for pack in best_fit(sizes, 10)]
    assert packs == [[7, 2, 1], [6, 4], [5, 5], [5, 2]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_best_fit_places_each_once_where_the_least_room_is_left(sizes: list[int]) -> None:
    packs = best_fit(sizes, 30)
    assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
    assert sorted(sum(sizes[i] for i in pack) for pack in packs) == twin(sizes, 30)


def test_best_fit_is_fast_and_refuses_what_is_too_long() -> None:
    sizes = np.random.default_rng(0).integers(1, 2049, 50_000).tolist()
    packs = best_fit(sizes, 2048)
    assert sum(sizes) / (len(packs) * 2048) > 0.99
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        best_fit([3, 5], 4)


def piece(rng: np.random.Generator, length: int, trained: int) -> Tokens:
    mask = np.arange(length) >= length - trained
    return Tokens(rng.integers(4, 19, length).astype(np.int32), mask)


def trees(seed: int = 0) -> list[Tree]:
    """A document, a preference with branches of 2 and 3 tokens, a completion."""
    rng = np.random.default_rng(seed)
    branches = (piece(rng, 2, 2), piece(rng, 3, 3))
    return [
        Tree(piece(rng, 5, 4)),
        Tree(piece(rng, 4, 0), branches, labels=(0.0,)),
        Tree(piece(rng, 6, 2)),
    ]


def test_rows_by_hand() -> None:
    tree = trees()[1]
    rows = lay([[tree]], 10, ids=np.asarray([7]), episodes=2)
    assert rows.tokens[0].tolist() == [x for part in tree.parts for x in part.ids.tolist()] + [0]
    assert rows.end.tolist() == [[9, 9, 9, 9, 6, 6, 9, 9, 9, 10]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 6, 0]]
    assert rows.parent.tolist() == [[0, 0, 1, 2, 3, 4, 3, 6, 7, 9]]
    assert rows.mask.astype(int).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 0]]
    assert rows.episode.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 0]]
    assert rows.ids.tolist() == [7]
    check_rows(rows)


def test_padding_is_what_nobody_sees() -> None:
    packs = [trees()[:1], []]
    assert padding_share(lay(packs, 10, ids=np.arange(2))) == pytest.approx(15 / 20)
    assert padding_share(lay(packs[:1], 5, ids=np.arange(1))) == 0.0
    plain = causal_rows(jnp.ones((2, 4), jnp.int32), jnp.asarray([3, 0], jnp.int32))
    assert padding_share(plain) == pytest.approx(5 / 8)
    assert padding_share(jax.tree.map(jnp.zeros_like, plain)) == 1.0


@eqx.filter_jit
def logps(model: Decoder, rows: Rows) -> jax.Array:
    return score(model, rows).logps


def plain(pieces: Sequence[Tokens], width: int) -> Rows:
    """One sequence in a row."""
    tokens, mask = np.zeros((2, len(pieces), width), np.int32)
    for i, p in enumerate(pieces):
        tokens[i, : len(p)], mask[i, : len(p)] = p.ids, p.mask
    lengths = jnp.asarray([len(p) for p in pieces], jnp.int32)
    return causal_rows(jnp.asarray(tokens), lengths, jnp.asarray(mask, bool))


def joined(tree: Tree, branch: int) -> Tokens:
    parts = (tree.trunk, tree.branches[branch])
    return Tokens(*(np.concatenate([p.__dict__[k] for p in parts]) for k in ("ids", "mask")))


def test_documents_score_in_a_packed_row_as_alone(model: Decoder) -> None:
    a, pair, b = trees()
    rows = lay([[a, pair, b], [b]], 24, ids=np.arange(2), capacity=11, episodes=4)
    check_rows(rows)
    assert rows.episode[0].tolist()[:20] == [0] * 5 + [1] * 6 + [2] * 3 + [3] * 6
    got = np.asarray(logps(model, rows))
    alone = plain([a.trunk, joined(pair, 0), joined(pair, 1), b.trunk], 24)
    want = np.asarray(logps(model, alone))
    expected = np.zeros((2, 24))
    expected[0, :5] = want[0, :5]
    expected[0, 9:11], expected[0, 11:14] = want[1, 4:6], want[2, 4:7]
    expected[0, 14:20] = expected[1, :6] = want[3, :6]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert np.count_nonzero(expected) == 4 + 5 + 2 + 2


def test_a_pair_lies_as_group_rows_has_it() -> None:
    """Where both branches are of one length, so that neither is padded."""
    rng = np.random.default_rng(3)
    pairs = [Tree(piece(rng, 4, 0), (piece(rng, 3, 3), piece(rng, 3, 2))) for _ in range(2)]
    branches = [list(pair.branches) for pair in pairs]
    grouped = group_rows(
        jnp.asarray([pair.trunk.ids for pair in pairs]),
        jnp.full(2, 4, jnp.int32),
        jnp.asarray([[b.ids for b in both] for both in branches]),
        jnp.full((2, 2), 3, jnp.int32),
        jnp.asarray([[b.mask for b in both] for both in branches]),
    )
    rows = lay([[pair] for pair in pairs], 10, ids=np.arange(2), capacity=6, episodes=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, rows, grouped))
