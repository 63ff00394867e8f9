"""The benchmarks of compilation, scaling, accelerators and seeds: their arithmetic, and a tiny run
of each.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from experiments.benchmarks import compile, gpu, limits, scaling, seeds, step
from experiments.benchmarks.compiled import CACHED, PROGRAM, Programs
from experiments.benchmarks.gpu import Peak, decoding_bytes, flops, keys_seen, peak_of
from experiments.benchmarks.models import TINY
from experiments.benchmarks.program import products
from experiments.benchmarks.work import Generate, Grpo, Sft
from purepost.models import Decoder, init_decoder

SMALL = replace(TINY, hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """The tiny Llama."""
    return init_decoder(jr.key(0), TINY)


def test_an_exponent_is_that_of_a_power_law() -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert scaling.exponent(sizes, [3 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert scaling.exponent(sizes[-2:], [5.0, 5.0]) == pytest.approx(0.0, abs=1e-12)


def test_an_axis_is_measured_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = scaling.Axis((1, 2), lambda n: Sft(n, 8), lambda n: SMALL)
    monkeypatch.setitem(scaling.AXES, "batch", axis)
    (line,) = scaling.lines(["batch"], repeats=1)
    assert json.loads(json.dumps(line)) == line
    assert line["sizes"] == [1, 2] and len(line["seconds"]) == 2
    assert line["exponent"] == pytest.approx(line["last"])
    assert line["smallest"]["rows"] == 1


def test_flops_are_counted_by_hand(model: Decoder) -> None:
    assert keys_seen(1, 4) == 1 + 2 + 3 + 4
    assert keys_seen(5, 3) == 5 + 6 + 7
    body, head = 4 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256), 256 * 512
    attention = 4 * 4 * 256  # of a layer 4·heads·head_dim, for each key that is seen
    forward = 2 * (body + head) * 2 * 8 + attention * 2 * 36
    assert flops(model, Sft(2, 8)) == pytest.approx(3 * forward)
    # Four projections of 256 by 256 and three of 256 by 1024, in four layers.
    adapters = 4 * 3 * (4 * 512 + 3 * 1280)
    frozen = 2 * 2 * (body + head) * 16 + 3 * attention * 72 + 6 * adapters * 16
    assert flops(model, Sft(2, 8, rank=3)) == pytest.approx(frozen)
    # Two prompts of 4 tokens, once each; of each 3 completions of 2.
    seen = 2 * 10 + 6 * (5 + 6)
    once = 2 * (body * (8 + 12) + head * 12) + attention * seen
    assert flops(model, Generate(2, 4, 2, group=3)) == pytest.approx(once)
    assert flops(model, Grpo(2, 4, 2, group=3)) == pytest.approx(5 * once)


def test_decoding_reads_weights_and_the_filled_cache(model: Decoder) -> None:
    numbers = 512 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 1024) + 9 * 256
    held = 2 * (4 + 3 * 2 / 2)  # tokens: the prompts, and half of what is generated
    expected = 4 * (numbers + held * 2 * 4 * 4 * 64)
    assert decoding_bytes(model, Generate(2, 4, 2, group=3)) == expected


def test_peaks_go_by_the_devices_kind() -> None:
    assert peak_of("NVIDIA H200") == Peak(989e12, 4.8e12)
    assert peak_of("NVIDIA H100 PCIe") == Peak(756e12, 2.0e12)
    assert peak_of("NVIDIA L40S") == Peak(362e12, 0.864e12)
    assert peak_of("NVIDIA L4") == Peak(121e12, 0.3e12)
    assert peak_of("TPU v5 lite") == Peak(197e12, 0.819e12)
    assert peak_of("cpu") is None


def test_the_accelerators_figures_run_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.CONFIGS, "tiny", SMALL)
    peak = Peak(1e12, 1e11)
    line = gpu.line("tiny", "generate", 1, peak)
    assert line["dtype"] == "bfloat16"
    assert line["mfu"] == pytest.approx(line["tflops"], rel=0.1, abs=1e-3)
    assert line["bandwidth"] is None or line["bandwidth"] > 0
    assert json.loads(json.dumps(line)) == line


def test_one_peak_alone_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--peak-tflops", "100"])
    assert "expected both of --peak-tflops and --peak-gbps" in capfd.readouterr().err


def test_programs_are_counted() -> None:
    programs = Programs()
    before = programs.fields()
    assert set(before) == {"made", "cached", "seconds"}
    programs._made(PROGRAM, 1.5)
    programs._made("/other", 9.0)
    programs._found(CACHED)
    programs._found("/other")
    after = programs.fields()
    assert [round(after[k] - before[k], 3) for k in ("made", "cached", "seconds")] == [1, 1, 1.5]


def test_cold_and_cached_starts_are_compared(tmp_path: Any) -> None:
    """A library is run twice with one cache directory, and has another in the next round."""
    log = tmp_path / "log"

    def command(name: str, seconds: float) -> list[str]:
        fields = {k: 1 for k in compile.KEPT} | {"process_seconds": seconds}
        code = (
            f"import os; d = os.environ['JAX_COMPILATION_CACHE_DIR']; "
            f"print({name!r}, d, file=open({str(log)!r}, 'a')); print({json.dumps(fields)!r})"
        )
        return [sys.executable, "-c", code]

    commands = {"purepost": command("a", 2.0), "tunix": command("b", 4.0)}
    lines = list(compile.measure({"figure": "grpo"}, commands, 2, {}))
    names, directories = zip(*(x.split() for x in log.read_text().splitlines()), strict=True)
    assert "".join(names) == "aabbaabb"
    assert len(set(directories)) == 4
    assert all(directories[i] == directories[i + 1] for i in range(0, 8, 2))
    assert [line and line.get("way") for line in lines[:4]] == ["cold", "cached"] * 2
    cold, cached = lines[-2:]
    assert cold is not None and cached is not None
    assert (cold["way"], cold["process_seconds"]["median"]) == ("cold", 0.5)
    assert (cached["way"], cached["ratio"]) == ("cached", "purepost/tunix")


@pytest.mark.slow
def test_a_loop_of_fused_steps_is_the_run_in_one_program() -> None:
    config = seeds.config_of(8, steps=2)
    looped = jnp.stack(seeds.loop(config)(jnp.int32(3)))
    whole = seeds.make_run(config)(jnp.int32(3))
    np.testing.assert_allclose(looped, whole, atol=1e-6)


def test_vmap_pays_where_it_takes_four_fifths() -> None:
    def line(hidden: int, loop: float, scan: float) -> dict[str, Any]:
        of = {"loop": loop, "scan": scan, "map": 1.0}
        return {"hidden": hidden} | {f"vmap/{k}": {"median": v} for k, v in of.items()}

    lines = [line(16, 0.3, 0.7), line(32, 0.8, 0.9), line(64, 1.1, 1.2)]
    assert seeds.pays(lines) == {"loop": [16, 32], "scan": [16], "map": []}


def test_products_of_a_program_are_those_that_run() -> None:
    """Each with its sides and axes, as often as a loop runs it; and their FLOPs."""
    w, x, y = jnp.ones((7, 16, 16)), jnp.ones((4, 16)), jnp.ones((3, 5, 4))

    def f(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return jnp.einsum("bij,bjk->bik", y, jnp.broadcast_to(x, (3, 4, 16)) * y.sum())

    text = jax.jit(f).lower(w, x, y).compile().as_text() or ""
    found = products(text)
    assert sorted(found.values()) == [1, 7]
    for product, runs in found.items():
        a, b = (np.random.default_rng(0).normal(size=side) for side in product[:2])
        axes = (product.lhs_contracting, product.rhs_contracting)
        out = jax.lax.dot_general(a, b, (axes, (product.lhs_batch, product.rhs_batch)))
        np.testing.assert_allclose(np.einsum(product.equation, a, b), out, rtol=1e-4, atol=1e-5)
        inner = np.prod([product.lhs[i] for i in product.lhs_contracting])
        assert product.flops == 2 * out.size * inner == (2 * 3 * 5 * 4 * 16 if runs == 1 else 2048)


@pytest.mark.parametrize(
    "work", [Sft(2, 8), Sft(2, 8, rank=2), Grpo(2, 4, 2, group=2), Generate(2, 4, 32, group=2)]
)
def test_a_step_beside_its_products(
    work: Sft | Grpo | Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENOUGH", 0.0)
    monkeypatch.setattr(limits, "MEMORY", 2**12)
    line = limits.measure(work, SMALL, None, {})
    assert all(line[name] > 0 for name in ("seconds", "products_seconds", "read_seconds"))
    assert ("optimizer_seconds" in line) != isinstance(work, Generate)
    assert len(line["slowest"]) == 5 and all(runs > 0 for *_, runs, _ in line["slowest"])
    assert json.loads(json.dumps(line))["gflops"] >= 0


@pytest.mark.parametrize(
    "complaint",
    [
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        "MemoryError",
    ],
)
def test_what_does_not_fit_is_told_from_what_fails(complaint: str) -> None:
    """So that it is run again in more micro-batches, and a failure is not."""
    code = f"import sys; print({complaint!r}, file=sys.stderr); sys.exit(1)"
    with pytest.raises(MemoryError, match=complaint[-12:].replace(".", r"\.")):
        step.last_line([sys.executable, "-c", code], {})
    assert step.last_line([sys.executable, "-c", "import sys; sys.exit('no')"], {}) is None
