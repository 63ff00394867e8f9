"""Games of TextArena as they are, played by scripts."""

import random
import re
import sys
from typing import Any

import pytest

from purepost.environments.host import Failure, Pool
from purepost.environments.reasoning import reasoning_names
from purepost.environments.textarena import TextArena
from purepost.environments.verifiers import Verifiers


def guesses(game: TextArena, seed: int) -> tuple[list[str], float]:
    """What is shown when numbers are guessed by halves, and the reward."""
    shown, done, reward = [game.reset({}, seed)], False, 0.0
    low, high = 1, 20
    while not done:
        middle = (low + high) // 2
        text, reward, done = game.step(f"I guess [{middle}].")
        shown.append(text)
        low, high = (middle + 1, high) if "higher" in text else (low, middle - 1)
    return shown, reward


def test_a_game_of_one_player() -> None:
    shown, reward = guesses(TextArena("GuessTheNumber-v0"), 3)
    assert "between 1 and 20 within 10 turns" in shown[0]
    assert reward == 1.0
    assert {s.split()[-1] for s in shown[1:-1]} <= {"higher.", "lower."}
    assert len(shown) <= 6 and shown[-1] == ""


def test_options_are_the_games() -> None:
    game = TextArena("GuessTheNumber-v0", max_number=3, max_turns=5)
    assert "between 1 and 3 within 5 turns" in game.reset({}, 0)
    with pytest.raises(TypeError):
        TextArena("GuessTheNumber-v0", colour="red").reset({}, 0)


def test_the_seed_decides_and_nothing_else() -> None:
    """Interleaved games, and draws of others, change nothing."""
    alone = [guesses(TextArena("GuessTheNumber-v0"), seed) for seed in range(6)]
    assert len({len(shown) for shown, _ in alone}) > 1
    random.seed(0)
    expected = random.Random(0).random()
    games = [TextArena("Minesweeper-v0") for _ in range(4)]
    first = [game.reset({}, seed) for seed, game in enumerate([games[0], games[1]])]
    opened = games[0].step("[3 3]")[0]
    again = [games[2].reset({}, 0), games[3].reset({}, 1)]
    assert first == again
    games[3].step("[4 4]")
    assert games[2].step("[3 3]")[0] == opened
    assert random.random() == expected
    assert [guesses(TextArena("GuessTheNumber-v0"), seed) for seed in range(6)] == alone


def first_free(seen: str) -> str:
    """An opponent's move: the first that is left on the last board it has seen."""
    return re.findall(r"'(\[\d\])'", seen.rpartition("Available Moves")[2])[0]


@pytest.mark.parametrize(
    ("seat", "moves", "reward"),
    [
        (0, ["[4]", "[2]", "[6]"], 1),  # the opponent takes 0 and 1
        (1, ["[4]", "[2]", "[6]"], 1),  # 0, 1 and 3
        (1, ["[8]", "[7]"], -1),  # 0, 1 and 2
    ],
)
def test_a_game_of_two(seat: int, moves: list[str], reward: float) -> None:
    seen: list[str] = []

    def opponent(text: str) -> str:
        seen.append(text)
        return first_free(text)

    pool = Pool(lambda: TextArena("TicTacToe-v0", opponent=opponent, seat=seat))
    place = pool.seat()
    replies: list[Any] = [place.call("reset", {}, 0).result()]
    replies += [place.call("step", move).result() for move in moves]
    place.close()
    pool.close()
    assert [(r.reward, r.done) for r in replies[1:]] == [
        *[(0, False)] * (len(moves) - 1),
        (reward, True),
    ]
    texts = [r.messages[0]["content"] for r in replies[:-1]]
    assert f"You are Player {seat}" in texts[0]
    for text, move in zip(texts[1:], moves, strict=False):
        assert f"[Player {seat}] {move}" not in text  # its own move stands in the dialogue
        assert f"placed their symbol ({'OX'[seat]}) in cell {move[1]}" in text
        assert f"[Player {1 - seat}] [" in text
    assert f"You are Player {1 - seat}" in seen[0] and "Current Board" in seen[0]
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:], strict=False))


def test_what_cannot_be_played() -> None:
    with pytest.raises(ValueError, match="expected a seat below the number of players, got 1"):
        TextArena("TicTacToe-v0", seat=1)
    pool = Pool(lambda: TextArena("Nowhere-v0"))
    last = pool.seat().call("reset", {}, 0).result()
    assert isinstance(last, Failure) and "Nowhere-v0-raw not found" in last.why
    pool.close()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("textarena", "reasoning_gym", "verifiers.clients"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'purepost\[textarena\]'"):
        TextArena("TicTacToe-v0").reset({}, 0)
    with pytest.raises(ImportError, match=r"pip install 'purepost\[reasoning\]'"):
        reasoning_names()
    pool = Pool(lambda: Verifiers(None))
    last = pool.seat().call("reset", {}, 0).result()
    assert isinstance(last, Failure)
    assert "pip install 'purepost[verifiers]'" in last.why
    pool.close()
