"""Shapes, aliases, and the one alignment convention.

Shape letters: b batch rows, t time (tokens), v vocabulary, d model width, h heads, k head width,
g group (completions of one prompt), p prompts, n episodes, e episodes of one row, l layers, i/o
in/out, r rank.

Alignment: everything per token is aligned to the token it is *about*. `tokens[b, t]` has the
log-probability `logps[b, t]` = log π(token t | the tokens before it on its path), in nats; where
there is nothing before it, the mask is False.

A training row is a forest of tokens in preorder. Token i sees token j iff `j ≤ i < end[j]`, and
itself. One rule covers padding, packed documents, a prompt shared by the completions of a group,
and trees.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

KeyArray = Key[Array, ""]
Scalar = float | int | Float[Array, ""]


class Rows(eqx.Module):
    """Training rows: forests of tokens in preorder.

    A row (or a slot) of zeros is padding: it sees itself only and nothing sees it. `ids` names a
    row, so that randomness belongs to the row and not to its place in a batch.
    """

    tokens: Int[Array, "b t"]
    end: Int[Array, "b t"]  # where the subtree of the token's node ends: row index, exclusive
    positions: Int[Array, "b t"]  # depth: tokens before it on its path
    parent: Int[Array, "b t"]  # row index of the token before it on its path; a root's is its own
    mask: Bool[Array, "b t"]  # tokens that are trained
    episode: Int[
        Array, "b t"
    ]  # which episode of the row a trained token belongs to, 0 ≤ episode < e
    ids: Int[Array, " b"]  # row ids
    # The most trained tokens that one row may hold: only so many positions reach the vocabulary.
    # None: all of them.
    capacity: int | None = eqx.field(static=True, default=None)
    episodes: int = eqx.field(static=True, default=1)  # e: room for episodes in a row

    @property
    def most_trained(self) -> int:
        """The static bound on trained tokens per row, in tokens."""
        return self.tokens.shape[1] if self.capacity is None else self.capacity


@runtime_checkable
class LanguageModel(Protocol):
    """What a loss needs of a model: hidden states of rows, and logits of hidden states."""

    def __call__(
        self, rows: Rows, *, key: KeyArray | None = None
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Hidden states after the last norm, and the keys and values that decoding continues
        from.
        """
        ...

    @property
    def unembed(self) -> Callable[[Float[Array, "*s d"]], Float[Array, "*s v"]]:
        """Hidden states → logits (float32): a pytree of the head's weights and no others."""
        ...


def causal_rows(
    tokens: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    mask: Bool[Array, "b t"] | None = None,
    *,
    ids: Int[Array, " b"] | None = None,
    capacity: int | None = None,
) -> Rows:
    """Rows of one plain sequence each: `tokens[b, :lengths[b]]`, padded on the right.

    `mask` marks the trained tokens; by default every token but the first.
    """
    b, t = tokens.shape
    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    real = index < lengths[:, None]
    trained = (real if mask is None else mask & real) & (index > 0)
    return Rows(
        tokens=tokens,
        end=jnp.where(real, lengths[:, None], index + 1),
        positions=jnp.where(real, index, 0),
        parent=jnp.where(real, jnp.maximum(index - 1, 0), index),
        mask=trained,
        episode=jnp.zeros((b, t), jnp.int32),
        ids=jnp.arange(b, dtype=jnp.int32) if ids is None else ids,
        capacity=capacity,
    )


def group_rows(
    prompts: Int[Array, "p s"],
    prompt_lengths: Int[Array, " p"],
    branches: Int[Array, "p g t"],
    branch_lengths: Int[Array, "p g"],
    mask: Bool[Array, "p g t"],
    *,
    ids: Int[Array, " p"] | None = None,
    restarts: Bool[Array, "p g t"] | None = None,
) -> Rows:
    """Rows that share a prompt: [prompt | branch 0 | … | branch g−1], each branch continuing the
    prompt.

    The prompt is computed once, forward and backward. Branch `i` is episode `i` of its row. A token
    that `restarts` marks continues the prompt again: its branch is several, and one episode.
    """
    p, s = prompts.shape
    _, g, t = branches.shape
    width = s + g * t
    trunk = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (p, s))
    trunk_real = trunk < prompt_lengths[:, None]
    step = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (p, g, t))
    start = s + t * jnp.arange(g, dtype=jnp.int32)[None, :, None]
    index = start + step
    real = step < branch_lengths[:, :, None]
    first, until = jnp.zeros_like(step), jnp.broadcast_to(branch_lengths[:, :, None], (p, g, t))
    if restarts is not None:
        first = jax.lax.cummax(jnp.where(restarts, step, 0), axis=2)
        later = jnp.pad(
            jnp.where(restarts, step, t)[:, :, 1:], [(0, 0), (0, 0), (0, 1)], constant_values=t
        )
        until = jnp.minimum(jax.lax.cummin(later, axis=2, reverse=True), until)
    last_of_prompt = (prompt_lengths - 1)[:, None, None]

    def join(of_trunk: Array, of_branches: Array) -> Array:
        return jnp.concatenate([of_trunk, of_branches.reshape(p, g * t)], 1)

    before = jnp.where(step == first, last_of_prompt, index - 1)
    depth = prompt_lengths[:, None, None] + step - first
    return Rows(
        tokens=join(prompts, branches),
        end=join(
            jnp.where(trunk_real, width, trunk + 1), jnp.where(real, start + until, index + 1)
        ),
        positions=join(jnp.where(trunk_real, trunk, 0), jnp.where(real, depth, 0)),
        parent=join(
            jnp.where(trunk_real, jnp.maximum(trunk - 1, 0), trunk), jnp.where(real, before, index)
        ),
        mask=join(jnp.zeros((p, s), bool), mask & real),
        episode=join(
            jnp.zeros((p, s), jnp.int32),
            jnp.broadcast_to(jnp.arange(g, dtype=jnp.int32)[None, :, None], (p, g, t)),
        ),
        ids=jnp.arange(p, dtype=jnp.int32) if ids is None else ids,
        capacity=g * t,
        episodes=g,
    )


def check_rows(rows: Rows) -> None:
    """Raise ValueError unless the rows are forests in preorder (on the host; for data made by
    hand and for tests).
    """
    end, parent, positions, mask = (
        np.asarray(x) for x in (rows.end, rows.parent, rows.positions, rows.mask)
    )
    b, t = end.shape
    index = np.broadcast_to(np.arange(t), (b, t))
    zero = ~np.asarray(rows.tokens, bool) & (end == 0) & (parent == 0) & (positions == 0) & ~mask
    root = (parent == index) | zero
    up = np.take_along_axis(end, parent, 1)
    up_position = np.take_along_axis(positions, parent, 1)
    faults = {
        "end[i] ≥ i+1 and ≤ the row's length": ((end <= index) | (end > t)) & ~zero,
        "parent[i] ≤ i": (parent > index) | (parent < 0),
        "a root is not trained": root & mask,
        "a child lies in its parent's subtree": ~root & ((index >= up) | (end > up)),
        "positions[i] = positions[parent[i]] + 1": ~root & (positions != up_position + 1),
        "at most `capacity` trained tokens": mask.sum(1, keepdims=True) > rows.most_trained,
    }
    for law, broken in faults.items():
        if broken.any():
            row, *place = (int(x[0]) for x in np.nonzero(broken))
            raise ValueError(f"rows break “{law}” in row {row}, token {place}")


def divide_rows(x: Float[Array, "b *s"]) -> Float[Array, "b *s"]:
    """x with its rows over the devices, each row whole: as a batch lies.

    Said once, of the hidden states that a lookup makes: the compiler would else divide their
    features as it finds the weights' divided, and gather the rows. Meshes end in the axis of
    features; all before it are of rows. Without a mesh, or where rows do not divide: x as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh.axis_names[:-1]
    if not axes or not isinstance(x, Tracer):
        return x
    if x.shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def num_rows(batch: PyTree) -> int:
    """The length of the leading axis that every array of a batch shares."""
    sizes = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(batch) if eqx.is_array(x)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"expected a batch whose arrays share one leading axis of rows, got sizes {sizes}"
        )
    return next(iter(sizes))
