"""Rows laid closer: nothing left of what pads them inside, and as many to a row as fit.

Completions are drawn into room for the longest allowed, and most are shorter; what a training row
of them costs is its width.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..models.moe import real_tokens
from ..types import Rows
from .collect import Episodes, Places, to_rows
from .sample import bucket


def best_fit(sizes: Sequence[int], width: int) -> list[list[int]]:
    """Which examples share a row of `width` tokens: the longest first, each into the row with the
    least room that is enough.

    Source: Ding et al., Fewer Truncations Improve Language Modeling, 2404.10830, §3. Differs from
    the paper: examples longer than a row were cut before, not split over several.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # the different rooms that are left in some row, ascending
    having: dict[int, list[int]] = {}  # room → the rows that have it
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[i] > width:
            raise ValueError(f"expected examples of at most {width} tokens, got {sizes[i]}")
        at = bisect_left(rooms, sizes[i])
        if at < len(rooms):
            room = rooms[at]
            pack = having[room].pop()
            if not having[room]:
                del having[rooms.pop(at)]
        else:
            room, pack = width, len(packs)
            packs.append([])
        packs[pack].append(i)
        left = room - sizes[i]
        if left and left not in having:
            insort(rooms, left)
            having[left] = []
        if left:
            having[left].append(pack)
    return packs


def padding_share(rows: Rows) -> Float[Array, ""]:
    """The share of the rows' tokens that nobody sees: 0 for full rows, 1 for empty ones."""
    return 1.0 - real_tokens(rows).mean(dtype=jnp.float32)


class Shape(NamedTuple):
    """What a program is compiled for."""

    rows: int
    width: int  # tokens
    capacity: int  # trained tokens of a row
    episodes: int  # of a row


class Moves(eqx.Module):
    """Which row and place of the rows before each token of the packed ones comes from, and which
    of its episodes each episode; beyond the last row where there is none.
    """

    tokens: tuple[Int[np.ndarray, "b t"], Int[np.ndarray, "b t"]]
    episodes: tuple[Int[np.ndarray, "b e"], Int[np.ndarray, "b e"]]


def pack_rows(rows: Rows, *, width: int | None = None, multiple: int = 1) -> tuple[Rows, Moves]:
    """The same trees in fewer, closer rows of `width` tokens, by default those that the longest
    needs, and a multiple of `multiple` rows; sizes are rounded up to few.

    On the host. A token keeps its depth and what it sees, so only rounding differs. Error: a row of
    more real tokens than the width.
    """
    real = np.asarray(real_tokens(rows))
    sizes, trained = real.sum(1), np.asarray(rows.mask).sum(1)
    width = bucket(max(int(sizes.max()), 1)) if width is None else width
    packs = best_fit(sizes.tolist(), width)
    shape = Shape(
        rows=multiple * bucket(-(-len(packs) // multiple), 1),
        width=width,
        capacity=min(width, bucket(max(int(trained[pack].sum()) for pack in packs))),
        episodes=rows.episodes * bucket(max(map(len, packs)), 1),
    )
    moves = _moves(packs, real, rows.episodes, shape)
    return _moved(rows, moves, real, shape), moves


def _moves(packs: Sequence[Sequence[int]], real: np.ndarray, episodes: int, shape: Shape) -> Moves:
    """Rows side by side, without their padding."""
    places = [np.full((shape.rows, n), len(real)) for n in (shape.width, shape.episodes)]
    inner = [np.zeros_like(place) for place in places]
    for number, pack in enumerate(packs):
        at = 0
        for k, row in enumerate(pack):
            kept = np.flatnonzero(real[row])
            tokens, those = slice(at, at + len(kept)), slice(k * episodes, (k + 1) * episodes)
            places[0][number, tokens], inner[0][number, tokens] = row, kept
            places[1][number, those], inner[1][number, those] = row, np.arange(episodes)
            at += len(kept)
    return Moves((places[0], inner[0]), (places[1], inner[1]))


def _moved(rows: Rows, moves: Moves, real: np.ndarray, shape: Shape) -> Rows:
    """The rows' tokens where they are now."""
    (row, place), n = moves.tokens, len(real)
    there, index = row < n, np.broadcast_to(np.arange(shape.width), row.shape)
    row = np.minimum(row, n - 1)
    # Of each place of a row before, how many real tokens of it come earlier; and where the row is.
    before = np.pad(np.cumsum(real, 1), [(0, 0), (1, 0)])
    start = index - before[row, place]
    source = moves.episodes[0]
    first = np.argmax(source[:, None, :] == row[:, :, None], 2)  # the row's first episode now
    names = ("tokens", "end", "positions", "parent", "mask", "episode")
    taken = {name: np.asarray(vars(rows)[name])[row, place] for name in names}
    fields = {
        "tokens": (taken["tokens"], 0),
        "end": (start + before[row, taken["end"]], index + 1),
        "positions": (taken["positions"], 0),
        "parent": (start + before[row, taken["parent"]], index),
        "mask": (taken["mask"], False),
        "episode": (np.where(taken["mask"], first + taken["episode"], 0), 0),
    }
    dtype = {"mask": jnp.bool_}
    arrays = {
        name: jnp.asarray(np.where(there, *pair), dtype.get(name, jnp.int32))
        for name, pair in fields.items()
    }
    ids = jnp.arange(shape.rows, dtype=jnp.int32)
    return Rows(**arrays, ids=ids, capacity=shape.capacity, episodes=shape.episodes)


def _after(places: Places, moves: Moves) -> Places:
    """Where the episodes lie once their rows are packed."""
    beyond = np.iinfo(np.int32).max
    follow = lambda x, at: x.at[at].get(mode="fill", fill_value=beyond)  # noqa: E731
    return Places(follow(places.episodes, moves.episodes), follow(places.tokens, moves.tokens))


@dataclass(frozen=True)
class Packed:
    """Lays episodes into packed rows, in the place of `to_rows`: a group and its prompt is a tree,
    and a row holds several. It runs on the host: the step is not fused.

    `width` (tokens) fixes the rows' width; groups that are longer have their prompt repeated in
    several rows. `multiple`: what the number of rows has to divide by (minibatches, devices).
    `shapes` are those met so far: a program is compiled for each.
    """

    width: int | None = None
    multiple: int = 1
    shapes: set[Shape] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name, n in {"width": self.width, "multiple": self.multiple}.items():
            if n is not None and n < 1:
                raise ValueError(f"expected {name} ≥ 1, got {n}")

    def __call__(self, episodes: Episodes) -> tuple[Rows, Places]:
        """Rows, and where the episodes lie in them. Errors: a fused step, temperatures that differ
        between episodes, a prompt and completion longer than the width.
        """
        if isinstance(episodes.tokens, Tracer):
            raise TypeError(
                "rows are packed on the host and cannot be fused; use train(..., fused=False)"
            )
        if len(set(np.asarray(episodes.temperature).tolist())) > 1:
            raise ValueError("expected episodes of one temperature, got several; use to_rows")
        rows, places = self._divided(episodes)
        rows, moves = pack_rows(rows, width=self.width, multiple=self.multiple)
        (b, t), e = rows.tokens.shape, rows.episodes
        self.shapes.add(Shape(b, t, rows.most_trained, e))
        return rows, _after(places, moves)

    def _divided(self, episodes: Episodes) -> tuple[Rows, Places]:
        """The largest parts of groups, all of one number, that fit into a row."""
        group = episodes.group.shape[0] // episodes.prompts.tokens.shape[0]
        longest = 0
        for per_row in (n for n in range(group, 0, -1) if group % n == 0):
            rows, places = to_rows(episodes, per_row=per_row)
            longest = int(real_tokens(rows).sum(1).max())
            if self.width is None or longest <= self.width:
                return rows, places
        raise ValueError(
            f"expected prompts and completions of at most {self.width} tokens together, got "
            f"{longest}; widen the rows"
        )
