"""The experiments run from end to end: slow, `make test-slow`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import demo, fused_seeds, sweep
from purepost.models.hub import load, load_adapter
from purepost.weights import has_adapters


def test_the_last_number_is_the_answer() -> None:
    """What the demo calls right."""
    assert demo.right("3 + 4 = 7.", "7") and demo.right("It is -2", "-2")
    assert not demo.right("7 is not 8", "7") and not demo.right("seven", "7")


def test_held_out_problems_are_not_trained_on() -> None:
    """The two halves share no question, and are the same each time."""
    held_out, training = demo.split(demo.Config())
    assert len(held_out) == 64 and not set(held_out) & set(training)
    assert (held_out, training) == demo.split(demo.Config())


@pytest.mark.slow
def test_the_demo_trains_stops_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two short steps on the real model leave everything that the demo promises."""
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    small = replace(demo.Config(), steps=2, prompts=2, group=4, max_tokens=8, held_out=4)
    demo.main(small)
    run = tmp_path / "runs" / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {
        "before", "after", "greedy_before", "greedy_after", "gain", "mcnemar",
    }  # fmt: skip
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (run / "picture.png").stat().st_size > 10_000
    model, _ = load("smollm2-135m")
    assert has_adapters(load_adapter(model, run / "adapter"))
    assert "held-out problems" in capsys.readouterr().out


@pytest.mark.slow
def test_mapped_seeds_equal_their_single_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` exits with an error where a seed's bits differ, and draws the curves."""
    monkeypatch.setattr(fused_seeds, "ROOT", tmp_path)
    fused_seeds.main(replace(fused_seeds.Config(), steps=4, seeds=3))
    assert len(re.findall("equal$", capsys.readouterr().out, re.M)) == 3
    assert (tmp_path / "runs" / "fused_seeds.png").is_file()


@pytest.mark.slow
def test_swept_points_equal_their_single_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` exits with an error where a point's bits differ, and leaves the table and curves."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    config = sweep.Config()
    run = replace(config.run, steps=3, prompts=2, group=4)
    sweep.main(replace(config, rates=(1e-3, 1e-2), clips=(0.2,), run=run))
    assert "those that differ from their run alone: []" in capsys.readouterr().out
    assert (tmp_path / "runs" / "sweep" / "sweep.md").read_text().count("\n") == 4
    assert (tmp_path / "runs" / "sweep" / "sweep.png").is_file()


def test_a_sweep_tries_every_rate_with_every_clip() -> None:
    config = replace(sweep.Config(), rates=(0.25, 0.5), clips=(0.125, 2.0), seeds=2)
    grid = np.asarray(sweep.points(config)).tolist()
    assert grid[:3] == [[0.25, 0.125, 0], [0.25, 0.125, 1], [0.25, 2.0, 0]]
    assert len(grid) == 8 and grid[-1] == [0.5, 2.0, 1]
    results = np.asarray([[[0.0, 0.5], [1.0, 1.0]], [[0.25, 0.25], [0.0, 1.0]]])
    assert sweep.table(results, config).splitlines() == [
        "| learning rate | clip 0.125 | clip 2 |",
        "|---|---|---|",
        "| 0.25 | 0.250 (0.000, 0.500) | 1.000 (1.000, 1.000) |",
        "| 0.5 | 0.250 (0.250, 0.250) | 0.500 (0.000, 1.000) |",
    ]


def test_the_interval_over_seeds_is_students() -> None:
    """Of 1, 2, 3: the deviation is 1, and t for 2 degrees of freedom is 4.3027."""
    assert fused_seeds.half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.3027 / 3**0.5, 1e-4)
