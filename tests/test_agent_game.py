"""The guessing game of experiments/agent_game.py: its players, its demonstrations, its table."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from experiments import agent_game
from experiments.agent_game import (
    BEGIN,
    FIRST,
    HIGHER,
    LOWER,
    Config,
    best,
    demonstrate,
    games,
    table,
    won,
)
from purepost.types import check_rows


def test_bisection_is_the_best_player() -> None:
    """By dynamic programming over what is left and the turns, choosing the best guess in each."""

    @cache
    def most(left: int, turns: int) -> float:
        """Numbers, of those left, that are found in so many turns."""
        if not left or not turns:
            return 0.0
        return max(1 + most(i, turns - 1) + most(left - 1 - i, turns - 1) for i in range(left))

    for numbers, turns in ((15, 4), (15, 3), (31, 5), (20, 4)):
        config = Config(numbers=numbers, turns=turns)
        assert best(config) == pytest.approx(most(numbers, turns) / numbers)
    assert best(Config()) == 1.0


def test_the_rate_of_a_player_who_only_guesses_is_known() -> None:
    """Without memory every turn hits with 1/n; with it, one number of 2 is found in two turns."""
    assert won(Config(skill=0.0)) == pytest.approx(1 - (14 / 15) ** 4)
    assert won(Config(skill=1.0, numbers=2, turns=2)) == pytest.approx(1.0)
    assert won(Config(skill=1.0, numbers=3, turns=2)) == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


def test_demonstrations_are_games_of_the_player_that_is_told_of() -> None:
    config = Config(demonstrations=1000)
    rows = jax.jit(lambda key: demonstrate(key, config))(jr.key(0))
    check_rows(rows)
    tokens, mask, wins = np.asarray(rows.tokens), np.asarray(rows.mask), []
    for ids, trained in zip(tokens, mask, strict=True):
        at = np.flatnonzero(trained)
        assert ids[0] == BEGIN and (at == 1 + 2 * np.arange(len(at))).all()
        low, high = 0, config.numbers  # what the answers leave
        for i in at[:-1]:
            number = ids[i] - FIRST
            assert ids[i + 1] in (HIGHER, LOWER)
            low, high = (
                (max(low, number + 1), high) if ids[i + 1] == HIGHER else (low, min(high, number))
            )
            assert low < high
        assert 0 <= ids[at[-1]] - FIRST < config.numbers
        wins.append(len(at) < config.turns)
    # Those won before the last turn are the games that are shorter.
    assert np.mean(wins) == pytest.approx(won(replace(config, turns=3)), abs=0.05)


def test_games_are_of_the_numbers_given() -> None:
    tasks = games(jnp.asarray([3, 1], jnp.int32))
    assert tasks.prompts.tokens.tolist() == [[BEGIN], [BEGIN]]
    assert tasks.columns["number"].tolist() == [3, 1]


def test_the_table_names_seeds_their_mean_and_what_is_possible() -> None:
    rates = np.array([[0.25, 0.5, 0.625], [0.25, 0.5, 0.75]])
    lines = table(rates, 0.125, 1.0).splitlines()
    assert lines[2] == "| 0 | 0.250 | 0.500 | 0.625 |"
    assert lines[4].startswith("| mean, 95% | 0.250 ± 0.000 | 0.500 ± 0.000 | 0.688 ± ")
    text = " ".join(lines[6:])
    assert "demonstrations wins 0.125 of games, bisection 1.000." in text
    assert "PPO is ahead of GRPO by 0.188 ± " in text


@pytest.mark.slow
def test_a_short_run_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_game, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "agent_game.md"
    page.write_text("# A game\n\n| seed | before | after GRPO | after PPO |\nold\n")
    small = Config(seeds=2, warm_up=4, demonstrations=8, steps=2, prompts=2, group=4, held_out=1)
    agent_game.main(small)
    text = page.read_text()
    assert text.startswith("# A game\n\n| seed |") and "| 1 |" in text and "old" not in text
    assert (tmp_path / "docs" / "agent_game.png").stat().st_size > 10_000
