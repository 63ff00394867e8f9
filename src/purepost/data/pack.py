"""Rows out of examples: how they lie in a row."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ..types import Rows
from .examples import Tree


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
