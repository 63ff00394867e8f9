"""The benchmarks' lines and arithmetic. What they time is shrunk here to a few tokens."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.random as jr
import pytest

from experiments.benchmarks import measure, step
from experiments.benchmarks.models import TINY, load_model, prompts_for, tiny_tokenizer
from experiments.benchmarks.ours import measure as measure_ours
from experiments.benchmarks.work import (
    FIGURES,
    Generate,
    Grpo,
    Score,
    Sft,
    Work,
    digits,
    does,
    split,
    splits,
    token_rows,
    turn,
)
from purepost import tree
from purepost.models import init_decoder
from purepost.models.hub import save

FIELDS = {
    "seconds",
    "seconds_low",
    "seconds_high",
    "steps",
    "clean_steps",
    "tokens",
    "tokens_per_second",
    "parts",
    "peak_memory_gib",
    "load_seconds",
    "process_seconds",
    "first_step_seconds",
    "compile_seconds",
    "check",
    "threads",
    "versions",
    "dtype",
    "device",
}
SMALL: dict[str, tuple[Work, int]] = {  # with the tokens of a step
    "sft-lora": (Sft(2, 8, rank=2, warmups=1), 16),
    "generate-greedy": (Generate(2, 8, 17, temperature=0.0, warmups=1), 34),
    "score": (Score(2, 8, warmups=1), 16),
    "grpo": (Grpo(2, 8, 4, group=2, microbatches=2, warmups=1), 16),
    "grpo-fused": (Grpo(2, 8, 4, group=2, fused=True, warmups=1), 16),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of one narrow layer, as the peers would be given it."""
    config = replace(
        TINY,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
    )
    target = tmp_path_factory.mktemp("model") / "small"
    save(init_decoder(jr.key(0), config), tiny_tokenizer(), target)
    return str(target)


@pytest.mark.parametrize(
    "figure",
    [pytest.param(name, marks=[pytest.mark.slow] if "fused" in name else []) for name in SMALL],
)
def test_a_figure_has_every_field(figure: str, directory: str) -> None:
    work, tokens = SMALL[figure]
    line = measure_ours(work, directory, repeats=2)
    assert set(line) == FIELDS
    assert json.loads(json.dumps(line)) == line
    assert line["steps"] == 2
    assert line["tokens"] == tokens
    assert 0 < line["seconds_low"] <= line["seconds"] <= line["seconds_high"]
    assert line["tokens_per_second"] == pytest.approx(tokens / line["seconds"], rel=0.01)
    assert 0.05 < line["peak_memory_gib"] < 50
    assert 0 < line["first_step_seconds"] < line["process_seconds"]
    assert line["dtype"] == "float32"
    assert {"python", "jax", "equinox", "optax"} <= set(line["versions"])
    match work:
        case Sft():
            # Random rows, and a model that knows nothing: about ln 512.
            assert line["check"]["loss"] == pytest.approx(6.238, abs=0.3)
        case Score():
            assert line["check"]["logp"] == pytest.approx(-6.238, abs=0.3)
        case Generate():
            assert len(line["check"]["tokens"]) == 16
        case Grpo(fused=True):
            assert line["check"] == {"length": 4.0}
            assert line["parts"] == {}
        case Grpo():
            assert line["check"] == {"length": 4.0}
            parts = line["parts"]
            assert set(parts) == {"rollout_seconds", "reference_seconds", "train_seconds"}
            assert all(seconds > 0 for seconds in parts.values())
            assert sum(parts.values()) == pytest.approx(line["seconds"], rel=0.5)


def clock_of(ats: Sequence[float], others: Sequence[float]) -> measure.Clock:
    """A clock whose step i lasts from ats[i] to ats[i+1], while others use others[i] CPU seconds
    and we as many as it lasts.
    """
    busy, own, marks = 0.0, 0.0, [measure.Mark(ats[0], 0.0, 0.0)]
    for a, b, other in zip(ats, ats[1:], others, strict=False):
        own += b - a
        busy += b - a + other
        marks.append(measure.Mark(b, busy, own))
    return measure.Clock(marks)


def described(clock: measure.Clock, parts: dict[str, list[float]]) -> dict[str, Any]:
    return measure.describe(
        clock,
        warmups=1,
        tokens=100,
        parts=parts,
        load_seconds=0.5,
        packages=("jax", "no-such-package"),
        check=None,
    )


def test_steps_disturbed_by_others_are_left_out() -> None:
    # A warm-up of 10 s, then 2, 3, 9 (disturbed) and 4 s.
    line = described(
        clock_of([0, 10, 12, 15, 24, 28], [0, 0, 0.1, 4, 0]), {"p": [9.0, 1.0, 2.0, 6.0, 3.0]}
    )
    assert (line["steps"], line["clean_steps"]) == (3, 3)
    assert (line["seconds_low"], line["seconds"], line["seconds_high"]) == (2, 3, 4)
    assert line["tokens_per_second"] == 33.33
    assert line["parts"] == {"p": 2.5}
    assert line["first_step_seconds"] == 10
    assert line["compile_seconds"] == 7
    assert "no-such-package" not in line["versions"]


def test_all_steps_count_when_too_few_are_clean() -> None:
    line = described(clock_of([0, 10, 12, 15, 24, 28], [0, 0, 3, 4, 0]), {})
    assert (line["steps"], line["clean_steps"]) == (4, 2)
    assert line["seconds"] == 3.5
    with pytest.raises(ValueError, match="expected more than 1 steps, the warm-up, got 1"):
        described(clock_of([0, 10], [0]), {})


def test_peak_memory_is_this_programs_own() -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); from experiments.benchmarks.measure import *; "
        "before = peak_memory(); x = bytearray(2**28); print(before, peak_memory() - before)"
    )
    held = bytearray(2**28)  # the child is started by a process larger than it
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=step.ROOT, check=True
    )
    before, grown = map(float, run.stdout.split())
    assert len(held) == 2**28
    assert before < 0.2
    assert grown == pytest.approx(0.25, abs=0.01)


def test_ratios_are_taken_round_by_round() -> None:
    def line(seconds: float, memory: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "tokens_per_second": 100 / seconds,
            "peak_memory_gib": memory,
            "check": {"loss": seconds},
            "microbatches": 1,
        }

    rounds = [
        {"purepost": line(1.0, 2.0), "trl": line(2.0, 8.0)},
        {"purepost": line(3.0, 2.0), "trl": line(4.0, 4.0)},
        {"purepost": line(1.0, 3.0), "trl": line(4.0, 8.0)},
    ]
    found = step.compare("grpo", "tiny", "trl", rounds)
    assert found["ratio"] == "purepost/trl"
    assert found["seconds"] == {"median": 0.5, "low": 0.25, "high": 0.75}
    assert found["tokens_per_second"] == {"median": 2.0, "low": 1.333, "high": 4.0}
    assert found["peak_memory_gib"] == {"median": 0.375, "low": 0.25, "high": 0.5}
    assert found["rounds"] == 3
    assert found["checks"] == {"purepost": {"loss": 1.0}, "trl": {"loss": 2.0}}
    assert found["disagreements"] == ["loss: 1.0 here, 2.0 there"]


@pytest.mark.parametrize(
    ("ours", "theirs", "faults"),
    [
        ({"loss": 6.2924}, {"loss": 6.2983}, 0),  # 9e-4
        ({"loss": 6.2924}, {"loss": 6.2988}, 1),  # 1.02e-3
        ({"logp": -6.2924}, {"logp": -6.2988}, 1),
        ({"length": 64.0}, {"length": 63.9375}, 1),  # one of sixteen a token short
        ({"length": 64.0}, {"length": 64.0}, 0),
        ({"tokens": [1]}, {"tokens": [2]}, 0),  # two candidates may tie
        (None, None, 0),
    ],
)
def test_libraries_that_did_other_work_are_told(ours: Any, theirs: Any, faults: int) -> None:
    assert len(step.disagreements(ours, theirs)) == faults


ANY: dict[str, Any] = {
    "seconds": 1.0,
    "tokens_per_second": 1.0,
    "peak_memory_gib": 1.0,
    "check": None,
}


def test_a_step_that_takes_too_much_memory_is_split(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time; hungry = bytearray(2**28 // int(sys.argv[1])); "
        f"time.sleep(60 if len(hungry) > 2**27 else 0); print({json.dumps(ANY)!r})"
    )
    commands = {"purepost": [sys.executable, "-c", code]}
    line, again = step.measure("grpo-long", "tiny", commands, 2, {}, most=0.2)
    assert line is not None and again is not None
    assert (line["microbatches"], again["microbatches"]) == (2, 2)
    assert capfd.readouterr().err.count("it took more") == 1
    hungry = "import time; x = bytearray(2**28); time.sleep(60)"
    alone = {"purepost": [sys.executable, "-c", hungry]}
    assert list(step.measure("sft-full", "tiny", alone, 1, {}, most=0.2)) == [None]


def test_libraries_take_turns_and_a_failure_costs_only_its_own_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fields = ANY

    def command(name: str, rc: int = 0) -> list[str]:
        code = f"open({str(log)!r}, 'a').write({name!r}); print({json.dumps(fields)!r}); exit({rc})"
        return [sys.executable, "-c", code]

    commands = {"purepost": command("a"), "tunix": command("b"), "trl": command("c", 3)}
    lines = list(step.measure("grpo", "tiny", commands, 2, {}))
    assert log.read_text() == "abcabc"
    assert [line and line.get("library", line.get("ratio")) for line in lines] == [
        *["purepost", "tunix", None],
        *["purepost", "tunix", None],
        "purepost/tunix",
    ]
    first = lines[0]
    assert first is not None
    assert first["shapes"] == {"prompts": 4, "width": 64, "new": 64, "group": 4, "fused": False}
    assert (first["figure"], first["model"], first["round"]) == ("grpo", "tiny", 0)


def test_the_command_prints_a_line_and_refuses_what_it_does_not_know(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        step.main(["--only", "sft-huge"])
    assert "invalid choice: 'sft-huge'" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        step.main(["--repeats", "0"])
    assert "expected --repeats ≥ 1, got 0" in capfd.readouterr().err


def test_prompts_are_exact_and_survive_their_text() -> None:
    tokenizer = tiny_tokenizer()
    prompts = prompts_for(tokenizer, count=16, width=64)
    assert len({p.text for p in prompts}) == 16
    for text, ids in prompts:
        assert len(ids) == 64
        assert ids[0] == tokenizer.bos_id == 1
        assert tokenizer.encode(text) == ids[1:]
    with pytest.raises(ValueError, match="expected text for 2 prompts of 999999 tokens"):
        prompts_for(tokenizer, count=2, width=999999)


def test_the_tiny_model_is_that_of_the_peers() -> None:
    model, tokenizer = load_model("tiny")
    assert tokenizer.vocab_size == model.config.vocab_size == 512
    # Embedding, four layers of four projections and three MLP matrices, nine norms.
    expected = 512 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 1024) + 9 * 256
    assert tree.count(model) == expected


def test_work_is_the_same_in_every_process() -> None:
    work = FIGURES["sft-full"]
    assert isinstance(work, Sft)
    rows = token_rows(work, 512, 1)
    assert (len(rows), len(rows[0])) == (4, 256)
    assert rows == token_rows(replace(work, rank=16), 512, 1)
    assert rows != token_rows(work, 512, 2)
    assert 3 <= min(map(min, rows)) and max(map(max, rows)) < 512
    assert [turn(4, 0), turn(4, 5)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert digits("a1b22²") == 3


def test_only_a_grpo_step_is_split_where_memory_is_short() -> None:
    long = FIGURES["grpo-long"]
    assert splits(long) == [1, 2, 4]
    assert split(long, 4) == Grpo(4, 256, 64, group=8, microbatches=4)
    assert splits(FIGURES["sft-full"]) == [1]
    assert split(FIGURES["sft-full"], 1) == FIGURES["sft-full"]
    assert [name for name in FIGURES if does("torch", FIGURES[name])] == ["sft-full"]
