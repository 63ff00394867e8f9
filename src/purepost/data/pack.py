"""Rows out of examples: which of them share a row, and how they lie in it."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from ..types import Rows
from .examples import Tree


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


def lay(
    packs: Sequence[Sequence[Tree]],
    width: int,
    *,
    ids: Int[np.ndarray, " b"],
    capacity: int | None = None,
    episodes: int = 1,
) -> Rows:
    """A row for each pack: its examples side by side, none seeing another, then padding.

    Every branch is an episode of its row; a trunk without branches is one.
    """
    b = len(packs)
    index = np.broadcast_to(np.arange(width, dtype=np.int32), (b, width))
    tokens, positions, episode = (np.zeros((b, width), np.int32) for _ in range(3))
    end, parent, mask = index + 1, index.copy(), np.zeros((b, width), bool)
    for row, trees in enumerate(packs):
        at = number = 0
        for tree in trees:
            root, last = at, at + len(tree.trunk) - 1
            for k, part in enumerate(tree.parts):
                n, place = len(part), (row, slice(at, at + len(part)))
                depth = len(tree.trunk) if k else 0
                tokens[place], mask[place] = part.ids, part.mask
                positions[place] = depth + np.arange(n)
                parent[place] = np.arange(at - 1, at + n - 1)
                parent[row, at] = last if k else root
                end[place] = at + n if k else root + tree.size
                episode[place] = number + max(k - 1, 0)
                at += n
            number += max(len(tree.branches), 1)
    return Rows(
        tokens=jnp.asarray(tokens),
        end=jnp.asarray(end),
        positions=jnp.asarray(positions),
        parent=jnp.asarray(parent),
        mask=jnp.asarray(mask),
        episode=jnp.asarray(episode),
        ids=jnp.asarray(ids, jnp.int32),
        capacity=capacity,
        episodes=episodes,
    )


def padding_share(rows: Rows) -> float:
    """The share of the rows' tokens that nobody sees: 0 for full rows, 1 for empty ones."""
    return 1.0 - float(real_tokens(rows).mean())


def real_tokens(rows: Rows) -> Bool[np.ndarray, "b t"]:
    """The tokens that are no padding. A root that nothing follows counts as padding."""
    end, parent = np.asarray(rows.end), np.asarray(rows.parent)
    index = np.arange(end.shape[1])
    return (end > index + 1) | ((parent != index) & (end > 0))
