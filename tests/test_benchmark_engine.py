"""The engine's benchmark: its work and its lines."""

import json

import pytest

from experiments.benchmarks import engine
from experiments.benchmarks.engine import SIZES, Contest, best_occupancy, lengths_of, measure


def test_the_heavy_tail_has_as_many_tokens_in_each_octave() -> None:
    lengths = lengths_of(20_000)
    shares = [sum(n for n in lengths if n == size) / sum(lengths) for size in SIZES]
    assert shares == pytest.approx([1 / len(SIZES)] * len(SIZES), abs=0.05)
    assert lengths_of(50) == lengths_of(50)


def test_the_best_occupancy_is_that_of_slots_that_never_wait() -> None:
    # Slots: 3 | 1, 1, 4. Nine tokens in six steps of two slots.
    assert best_occupancy([3, 1, 1, 4], 2) == 9 / 12
    assert best_occupancy([2, 2, 2], 3) == 1.0
    assert best_occupancy(lengths_of(512), 8) > 0.9


def test_both_ways_are_measured_in_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    def way(name: str) -> dict[str, float]:
        calls.append(name)
        return {"tokens": 10.0, "occupancy": 0.5}

    contest = Contest("any", ("a", lambda: way("a")), ("b", lambda: way("b")))
    lines = list(measure(contest, 2))
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert [(x.get("way"), x.get("round")) for x in lines] == [
        *[("a", 0), ("b", 0)],
        *[("a", 1), ("b", 1), (None, None)],
    ]
    assert lines[0]["tokens_per_second"] > 0
    assert set(lines[-1]) == {"figure", "speed", "median", "low", "high"}
    assert lines[-1]["speed"] == "a/b"
    assert json.loads(json.dumps(lines)) == lines


def test_the_command_refuses_what_does_not_fill_batches(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        engine.main(["--requests", "12"])
    assert "a multiple of 8, got 12" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        engine.main(["--rounds", "0"])
    assert "expected --rounds ≥ 1, got 0" in capfd.readouterr().err
