"""The picture of a run."""

import struct
import sys

import numpy as np
import pytest

from purepost.track import Jsonl, picture
from purepost.track.picture import _curves, _panels, _smooth
from purepost.track.writers import read_jsonl


@pytest.fixture
def jsonl(tmp_path):
    writer = Jsonl(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        record = {
            "reward": step / 40,
            "reward/quantiles": [0.0, 0.1, 0.2, step / 40, 1.1, 1.2, 1.5],
            "loss": float("nan") if step == 3 else 1 / step,
            "rewards/exact/mean": step / 50,
            "rewards/format/mean": 0.5,
            "rewards/exact/failures": 0.0,
            "frac_unscored": 0.0,
            "completions/min_length": 3.0,
            "step_time": 60.0 if step == 1 else 1.0,  # the first step compiles
            "own/metric": float(step),
            "other": [1.0, 2.0],
        }
        writer.write(step, record)  # pyright: ignore[reportArgumentType]
    writer.close()
    return writer.path


def test_draws_a_png(jsonl, tmp_path) -> None:
    png = tmp_path / "out" / "run.png"
    picture(jsonl, png, title="A run")
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1800 and height == round((2.7 * 2 + 0.3) * 150)  # 6 panels, three a row


def test_shows_what_is_there_and_not_what_is_zero(jsonl) -> None:
    curves = _curves(read_jsonl(jsonl))
    assert [panel.title for panel in _panels(curves)] == [
        "Reward",
        "Rewards, distribution",
        "Loss",
        "Step time",
        "Reward functions, mean",
        "own/metric",
    ]
    steps, values = curves["loss"]
    assert len(steps) == 39 and 3.0 not in steps
    np.testing.assert_allclose(values * steps, 1)
    np.testing.assert_array_equal(curves["step_time"][1], np.ones(39))


def test_smoothing_keeps_straight_lines_and_short_curves() -> None:
    line = np.arange(300.0)
    np.testing.assert_allclose(_smooth(line)[20:-20], line[20:-20])
    noise = np.random.default_rng(0).normal(size=600)
    assert _smooth(noise).std() < 0.5 * noise.std()
    np.testing.assert_array_equal(_smooth(noise[:20]), noise[:20])


def test_nothing_to_draw_is_an_error(tmp_path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="expected metrics to draw"):
        picture(tmp_path / "empty.jsonl", tmp_path / "run.png")
    with pytest.raises(FileNotFoundError, match="expected metrics at"):
        picture(tmp_path / "missing.jsonl", tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


def test_matplotlib_missing_names_the_extra(jsonl, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"purepost\[demo\]"):
        picture(jsonl, tmp_path / "run.png")
