"""FrozenLake's rules against a twin in NumPy, and bisection against the hidden number."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.environments.grid import EIGHT, FOUR, Walk, grid
from purepost.environments.guess import Guessing, guess
from purepost.rollout.environment import Environment, Tokens

CELL, MOVE = 20, 4


def say(*ids: int) -> Tokens:
    return Tokens(jnp.asarray([*ids, 0, 0], jnp.int32), jnp.int32(len(ids)))


def twin(lake: tuple[str, ...], cell: int, move: int) -> int:
    """FrozenLake's next cell, where the ice does not slip."""
    row, column = divmod(cell, len(lake[0]))
    match move:
        case 0:
            column = max(column - 1, 0)
        case 1:
            row = min(row + 1, len(lake) - 1)
        case 2:
            column = min(column + 1, len(lake[0]) - 1)
        case 3:
            row = max(row - 1, 0)
    return row * len(lake[0]) + column


@pytest.mark.parametrize("lake", [FOUR, EIGHT])
def test_moves_are_frozen_lakes(lake: tuple[str, ...]) -> None:
    env, text = grid(lake, cell_id=CELL, move_id=MOVE, slippery=False), "".join(lake)
    cells, moves = (x.reshape(-1) for x in jnp.meshgrid(jnp.arange(len(text)), jnp.arange(4)))

    def one(cell: jax.Array, move: jax.Array) -> tuple[jax.Array, ...]:
        state, seen, reward, done = env.step(
            jr.key(0), Walk(cell), Tokens(move[None], jnp.int32(1))
        )
        return state.cell, seen.ids[0], reward, done

    found = jax.vmap(one)(cells.astype(jnp.int32), moves.astype(jnp.int32) + MOVE)
    rows = zip(*map(np.asarray, (cells, moves, *found)), strict=True)
    for cell, move, after, seen, reward, done in rows:
        expected = twin(lake, int(cell), int(move))
        assert int(after) == expected and int(seen) == CELL + expected
        assert float(reward) == (text[expected] == "G")
        assert bool(done) == (text[expected] in "GH")


def test_slippery_ice_goes_three_ways_with_one_third_each() -> None:
    env = grid(cell_id=CELL, move_id=MOVE)
    keys = jr.split(jr.key(0), 3000)
    for cell in (1, 9):
        for move in range(4):
            step = lambda k, c=cell, m=move: env.step(k, Walk(jnp.int32(c)), say(MOVE + m))  # noqa: E731
            after = np.asarray(jax.vmap(step)(keys)[0].cell)
            share = {int(c): float((after == c).mean()) for c in np.unique(after)}
            expected: dict[int, float] = {}
            for turned in (move - 1, move, move + 1):
                there = twin(FOUR, cell, turned % 4)
                expected[there] = expected.get(there, 0) + 1 / 3
            assert share.keys() == expected.keys()
            assert share == pytest.approx(expected, abs=0.05)


def play(env: Environment, policy: Callable[[int], int], key: jax.Array, turns: int) -> float:
    """The share of 500 walks by the policy (cell → move) that come to the goal."""
    table = jnp.asarray([policy(c) for c in range(16)], jnp.int32)

    def walk(key: jax.Array) -> jax.Array:
        state, _ = env.reset(key, {})

        def body(carry: tuple, k: jax.Array) -> tuple:
            state, done, total = carry
            after, _, reward, over = env.step(k, state, say(0))
            move = Tokens((table[state.cell] + MOVE)[None], jnp.int32(1))
            after, _, reward, over = env.step(k, state, move)
            state = jax.tree.map(lambda a, b: jnp.where(done, b, a), after, state)
            return (state, done | over, total + jnp.where(done, 0.0, reward)), None

        start = (state, jnp.bool_(False), jnp.float32(0))
        return jax.lax.scan(body, start, jr.split(key, turns))[0][2]

    return float(jax.vmap(walk)(jr.split(key, 500)).mean())


def test_the_known_optimum_of_the_slippery_lake() -> None:
    """Value iteration on the twin: without a limit on turns the goal is reached with probability
    14/17; its policy does so here. On firm ice the shortest way has six moves.
    """
    text, values = "".join(FOUR), np.zeros(16)
    q = np.zeros((16, 4))
    for _ in range(2000):
        q = np.array(
            [
                [
                    sum(
                        (text[n] == "G") + values[n] * (text[n] not in "GH")
                        for n in (twin(FOUR, c, (m + s) % 4) for s in (-1, 0, 1))
                    )
                    / 3
                    for m in range(4)
                ]
                for c in range(16)
            ]
        )
        values = q.max(1)
    assert values[0] == pytest.approx(14 / 17, abs=1e-3)
    best = q.argmax(1)
    slippery = grid(cell_id=CELL, move_id=MOVE)
    assert play(slippery, lambda c: int(best[c]), jr.key(1), 400) == pytest.approx(
        14 / 17, abs=0.05
    )
    firm = grid(cell_id=CELL, move_id=MOVE, slippery=False)
    way = {0: 1, 4: 1, 8: 2, 9: 2, 10: 1, 14: 2}
    assert play(firm, lambda c: way.get(c, 0), jr.key(1), 6) == 1
    assert play(firm, lambda c: way.get(c, 0), jr.key(1), 5) == 0


def test_other_tokens_stand_still_and_tasks_may_set_the_start() -> None:
    env = grid(cell_id=CELL, move_id=MOVE, each=-0.5)
    state, seen = env.reset(jr.key(0), {"start": jnp.int32(9)})
    assert seen.ids.tolist() == [CELL + 9] and int(seen.length) == 1
    for token in (0, MOVE - 1, MOVE + 4, 19):
        after, seen, reward, done = env.step(jr.key(0), state, say(token))
        assert int(after.cell) == 9 and float(reward) == -0.5 and not done
    for lake in ([], ["SF", "G"], ["SG", "XF"], ["SS", "FG"], ["SF", "FF"]):
        with pytest.raises(ValueError, match="expected"):
            grid(lake, cell_id=0, move_id=0)


def test_bisection_finds_every_number_in_the_turns_it_needs() -> None:
    env = guess(16, first_id=5, higher_id=1, lower_id=2, each=-0.1)
    step = jax.jit(env.step)
    for hidden in range(16):
        state, seen = env.reset(jr.key(0), {"number": jnp.int32(hidden)})
        assert int(seen.length) == 0
        low, high, middle, turns, done = 0, 15, 0, 0, False
        while not done:
            middle = (low + high) // 2
            state, seen, reward, done = step(jr.key(0), state, say(5 + middle))
            turns += 1
            assert float(reward) == pytest.approx(0.9 if middle == hidden else -0.1)
            if not done:
                assert seen.ids.tolist() == [1 if hidden > middle else 2]
                low, high = (middle + 1, high) if hidden > middle else (low, middle - 1)
        assert turns <= 5 and middle == hidden


def test_hidden_numbers_are_uniform_and_the_tasks_own() -> None:
    env = guess(5, first_id=5, higher_id=1, lower_id=2)
    drawn = jax.vmap(lambda k: env.reset(k, {})[0].hidden)(jr.split(jr.key(0), 5000))
    shares = np.bincount(np.asarray(drawn), minlength=5) / 5000
    assert shares == pytest.approx(np.full(5, 0.2), abs=0.03)
    _, _, reward, done = env.step(jr.key(0), Guessing(jnp.int32(0)), say(1))
    assert float(reward) == 0 and not done  # a token that names no number
    with pytest.raises(ValueError, match="expected numbers ≥ 1"):
        guess(0, first_id=0, higher_id=0, lower_id=0)
