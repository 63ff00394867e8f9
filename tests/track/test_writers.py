"""JSONL survives kills and resumes; TensorBoard; the tracker."""

import json
import sys

import jax.numpy as jnp
import pytest

from purepost.mean import LEVELS, Mean, quantiles, scalar_mean
from purepost.track import Jsonl, TensorBoard, Tracker, read_jsonl


def steps(path) -> list[int]:
    return [line["step"] for line in read_jsonl(path)]


def test_every_line_is_there_as_soon_as_written(tmp_path) -> None:
    writer = Jsonl(tmp_path / "run" / "metrics.jsonl")
    writer.write(1, {"loss": 0.5, "reward/quantiles": [0.0, 1.0], "bad": float("nan")})
    writer.write(2, {"loss": float("inf"), "list": [1.0, float("nan")]})
    first, second = map(json.loads, writer.path.read_text().splitlines())
    writer.close()
    assert first.pop("time") > 1.7e9
    assert first == {"step": 1, "loss": 0.5, "reward/quantiles": [0.0, 1.0], "bad": None}
    assert second["loss"] is None and second["list"] == [1.0, None]


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = Jsonl(path)
    for step in range(1, 6):
        writer.write(step, {"loss": step / 3})
    writer.close()
    before = read_jsonl(path)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert steps(path) == [1, 2, 3, 4, 5]
    resumed = Jsonl(path, step=3)
    assert read_jsonl(path) == before[:3]
    resumed.write(4, {"loss": 9.0})
    resumed.close()
    assert steps(path) == [1, 2, 3, 4]
    assert read_jsonl(path)[-1]["loss"] == 9.0
    Jsonl(path).close()
    assert steps(path) == []


def test_files_that_are_no_metrics_are_left_alone(tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text('{"step": 1}\nnot json\n')
    with pytest.raises(ValueError, match=r"in line 2 of .*notes.txt, got 'not json'"):
        Jsonl(path)
    assert path.read_text() == '{"step": 1}\nnot json\n'
    with pytest.raises(FileNotFoundError, match="expected metrics at"):
        read_jsonl(tmp_path / "missing.jsonl")


def test_tracker_adds_time_and_speed_and_closes(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Tracker(Jsonl(path)) as tracker:
        tokens = Mean(jnp.asarray(640.0), jnp.asarray(1.0))
        record = tracker.write(1, {"num_tokens": tokens, "loss": scalar_mean(0.25)}, epoch=2)
    (line,) = read_jsonl(path)
    assert line["loss"] == 0.25 and line["epoch"] == 2.0
    assert 0 < line["step_time"] < 60
    assert line["tokens_per_second"] == pytest.approx(640 / line["step_time"])
    assert {k: v for k, v in line.items() if k not in ("step", "time")} == record


def test_tensorboard_writes_scalars_and_quantiles(tmp_path) -> None:
    with Tracker(TensorBoard(tmp_path)) as tracker:
        tracker.write(
            1, {"loss": scalar_mean(0.5), "reward/quantiles": quantiles(jnp.arange(11.0))}
        )
    (events,) = tmp_path.glob("events.out.tfevents.*")
    text = events.read_bytes()
    assert b"loss" in text and b"reward/quantiles/q50" in text
    assert len(LEVELS) == text.count(b"reward/quantiles/q")


def test_tensorboard_missing_names_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"purepost\[tensorboard\]"):
        TensorBoard(tmp_path)
