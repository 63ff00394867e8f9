"""A run that was killed, wherever it was, ends with the bits of the run never stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from purepost.track import read_jsonl

SCRIPT = Path(__file__).with_name("resumed_run.py")
ROOT = SCRIPT.parents[1]


def run(directory: Path, *death: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, str(SCRIPT), str(directory), *death]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def committed(directory: Path) -> list[int]:
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def curves(directory: Path) -> list[tuple]:
    """What every step trained on and gave, but for its time."""
    names = ("step", "first", "second", "loss", "grad_norm", "skipped")
    return [tuple(line[name] for name in names) for line in read_jsonl(directory / "metrics.jsonl")]


def leaves(directory: Path) -> dict[str, tuple]:
    with np.load(directory / "final.npz") as file:
        return {name: (file[name].dtype, file[name].shape, file[name].tobytes()) for name in file}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("straight")
    done = run(directory)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "resumed after 0\n"
    return directory


def test_killed_and_resumed_is_to_the_bit_the_run_never_stopped(straight, tmp_path) -> None:
    # How it dies, the checkpoint it began from, and the one that is there afterwards.
    deaths = [
        (("in-save", "2"), 0, []),  # there is nothing to resume from yet
        (("in-step", "4"), 0, [2]),
        (("in-save", "4"), 2, [2]),  # keep=1, yet 2 stays: 4 is not committed
        (("after-metrics", "6"), 2, [4]),  # beyond the epoch's end after step 5
    ]
    for death, begun, kept in deaths:
        done = run(tmp_path, *death)
        assert done.returncode == -signal.SIGKILL, (death, done.stdout, done.stderr)
        assert done.stdout == f"resumed after {begun}\n", death
        assert committed(tmp_path) == kept, death
    done = run(tmp_path, "by-sigterm", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "resumed after 4\nstopped after 5\n"
    assert committed(tmp_path) == [5]
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "resumed after 5\n"
    assert committed(tmp_path) == committed(straight) == [7]
    assert curves(tmp_path) == curves(straight)
    assert leaves(tmp_path) == leaves(straight)


def test_the_run_trains_on_every_row_and_moves(straight) -> None:
    lines = curves(straight)
    assert [line[0] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(row for line in lines[:5] for row in line[1:3]) == list(range(10))
    assert len({line[3] for line in lines}) == 7
    assert all(line[5] == 0 for line in lines)
    names = leaves(straight)
    assert any(name.startswith("opt_state") for name in names)
    assert any(".average." in name for name in names)
    assert any(name.startswith("params.layers.attention.q") for name in names)
