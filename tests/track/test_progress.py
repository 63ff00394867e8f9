"""Progress lines."""

import io

import pytest
from rich.console import Console

from purepost.track import Progress


def lines(records, steps, **options) -> list[str]:
    out = io.StringIO()
    progress = Progress(steps, console=Console(file=out, width=40), **options)
    for step, record in records:
        progress.write(step, record)
    progress.close()
    return out.getvalue().splitlines()


def test_plain_lines_when_not_a_terminal() -> None:
    records = [
        (1, {"reward": 0.25, "loss": -0.0123456, "step_time": 40.0, "tokens_per_second": 1234.5}),
        (2, {"reward": 0.5, "step_time": 2.0}),
        (3, {"reward": 1.0, "step_time": 4.0}),
        (64, {"reward": 1.0, "step_time": 2.0}),
        (3700, {"loss": float("nan"), "step_time": 2.0}),
    ]
    # The first step compiles: it does not count. Medians: 2, 3, 2.
    assert lines(records, 3700) == [
        "step 1/3700  reward 0.25  loss -0.0123  tokens/s 1234",
        "step 2/3700  reward 0.5  2h03m left",
        "step 3/3700  reward 1  3h04m left",
        "step 64/3700  reward 1  2h01m left",
        "step 3700/3700  loss nan",
    ]


def test_short_times_left() -> None:
    records = [(1, {"step_time": 9.0}), (2, {"step_time": 3.0}), (80, {"step_time": 3.0})]
    assert [line.split("  ")[-1] for line in lines(records, 100)[1:]] == [
        "4m54s left",
        "1m00s left",
    ]
    assert lines([(1, {"step_time": 1.0}), (2, {"step_time": 5.0})], 3)[1].endswith("5s left")


def test_some_lines_only() -> None:
    records = [(step, {"loss": 1.0}) for step in range(1, 12)]
    assert [x.split()[1] for x in lines(records, 11, every=5)] == ["5/11", "10/11", "11/11"]


def test_one_live_line_in_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    progress = Progress(4, step=2, console=console)
    progress.write(3, {"reward": 0.125})
    progress.close()
    text = out.getvalue()
    assert "3/4" in text and "reward 0.125" in text


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="steps ≥ 1"):
        Progress(0)
