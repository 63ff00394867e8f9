"""Walking over a frozen lake to a goal without falling into a hole, by the rules of FrozenLake."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..rollout.environment import Environment, Tokens
from ..types import KeyArray

# S start, F frozen, H hole, G goal.
FOUR = ("SFFF", "FHFH", "FFFH", "HFFG")
EIGHT = (
    "SFFFFFFF",
    "FFFFFFFF",
    "FFFHFFFF",
    "FFFFFHFF",
    "FFFHFFFF",
    "FHHFFFHF",
    "FHFFHFHF",
    "FFFHFFFG",
)
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up: row, column


class Walk(eqx.Module):
    """Where the walker stands: cells are numbered row by row."""

    cell: Int[Array, ""]


def grid(
    lake: Sequence[str] = FOUR,
    *,
    cell_id: int,
    move_id: int,
    slippery: bool = True,
    goal: float = 1.0,
    each: float = 0.0,
) -> Environment[Walk]:
    """A walk from S to G. The first token of a turn moves: `move_id` + 0 left, 1 down, 2 right, 3
    up; any other stands still. The observation is `cell_id` + the cell.

    On slippery ice a move goes as meant or to either side of that, each with probability ⅓; at the
    edge it stays. A hole or the goal ends the episode. The reward is `each` a turn, and `goal` at
    the goal. A task may fix the cell to start from: {"start": ...}. Errors: rows of different
    widths, not one S, no G, other letters.
    """
    text, columns = "".join(lake), len(lake[0]) if lake else 0
    if {len(row) for row in lake} != {columns} or set(text) - set("SFHG"):
        raise ValueError(f"expected rows of one width, of the letters S, F, H, G, got {list(lake)}")
    if text.count("S") != 1 or "G" not in text:
        raise ValueError(f"expected one S and a G, got {list(lake)}")
    cells = np.arange(len(text)).reshape(-1, columns)
    beside = np.stack(
        [
            np.pad(cells, 1, mode="edge")[1 + r : 1 + r + len(lake), 1 + c : 1 + c + columns]
            for r, c in MOVES
        ],
        -1,
    )
    following = jnp.asarray(beside.reshape(-1, 4), jnp.int32)
    ends = jnp.asarray([letter in "HG" for letter in text])
    wins = jnp.asarray([letter == "G" for letter in text])

    def seen(cell: Int[Array, ""]) -> Tokens:
        return Tokens(cell[None] + cell_id, jnp.ones((), jnp.int32))

    def reset(key: KeyArray, task: dict[str, Array]) -> tuple[Walk, Tokens]:
        start = task["start"] if "start" in task else jnp.int32(text.index("S"))
        return Walk(start), seen(start)

    def step(
        key: KeyArray, state: Walk, action: Tokens
    ) -> tuple[Walk, Tokens, Float[Array, ""], Bool[Array, ""]]:
        move = action.ids[0] - move_id
        slip = jr.randint(key, (), -1, 2, jnp.int32) if slippery else jnp.int32(0)
        moved = following[state.cell, (move + slip) % 4]
        cell = jnp.where((move >= 0) & (move < 4), moved, state.cell)
        reward = each + jnp.where(wins[cell], goal, 0.0)
        return Walk(cell), seen(cell), reward, ends[cell]

    return Environment(reset, step)
