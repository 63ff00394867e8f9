"""The benchmark of memory: its account of a step, its lines and its page."""

import json
from dataclasses import replace

import jax
import pytest

from experiments.benchmarks import memory
from experiments.benchmarks.memory import Variant, step_of
from experiments.benchmarks.program import compile_step
from experiments.benchmarks.work import Sft

CONFIG = replace(
    memory.TINY,
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
)


def test_an_update_takes_the_place_of_parameters_masters_and_moments() -> None:
    """All of them, and masters only of what has fewer bits."""
    algorithm, state, batch = step_of(Sft(2, 16), CONFIG, Variant(dtype="bfloat16"))
    program = compile_step(algorithm, state, batch)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state))]
    numbers = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(sizes) == numbers * (2 + 4 + 4 + 4) + 4  # and Adam's count
    assert program.in_place >= sum(sizes) - 4
    assert program.peak < program.arguments + program.temporary + 1024


def test_the_benchmark_prints_its_lines_and_its_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    monkeypatch.setattr(memory, "use_compile_cache", lambda: None)
    monkeypatch.setattr(memory, "MODELS", {"tiny": CONFIG})
    monkeypatch.setattr(memory, "WORKS", {"tiny": (Sft(2, 16),)})
    monkeypatch.setattr(memory, "VARIANTS", (Variant(), Variant("lora", offload=True)))
    monkeypatch.setattr(memory, "VOCABULARY", 256)
    memory.main("tiny", "--write")
    *scores, full, lora = map(json.loads, capsys.readouterr().out.splitlines())
    assert full["peak_ratio"] == 1 and full["on_host_mib"] == 0
    assert lora["peak_mib"] < full["peak_mib"] and lora["on_host_mib"] > 0
    assert [line["shapes"]["tokens"] for line in scores] == [4096, 8192]
    page = (tmp_path / "docs" / "memory.md").read_text()
    assert f"| sft | full | float32 | dots | 1 |  | {full['peak_mib']} |" in page
    with pytest.raises(SystemExit, match="expected one of tiny"):
        memory.main("huge")
