"""How fast a step is, and how much memory it takes: one JSON line for every figure.

    python -m experiments.benchmarks.step                       every figure, both models
    python -m experiments.benchmarks.step --model tiny --only sft-full grpo --repeats 9
    python -m experiments.benchmarks.step --peers               beside Tunix and TRL
    python -m experiments.benchmarks.step --peers tunix         beside Tunix alone

Every figure is measured in a process of its own, so that its peak memory is its own: some warm-up
steps that compile, then `--repeats` timed ones, of which those during which other processes used
the CPU are left out. Everything is float32, on `--threads` CPUs; AdamW, gradients clipped at 1.

    sft-full            SFT of the whole model, 4 rows of 256 tokens
    sft-lora            the same with adapters of rank 16 on every linear layer
    generate-greedy     8 prompts of 64 tokens, 128 more of each, greedily
    generate-sample     the same at temperature 1
    generate-branches   8 completions of each of 8 prompts, 64 + 64 tokens, at temperature 1
    grpo                4 completions of each of 4 prompts, 64 + 64 tokens, and one optimizer step
                        of GRPO with a reference (β = .04)

All libraries run in one environment, with memory in huge pages where glibc gives them.
Completions do not end early. A line's `parts` are the seconds a GRPO step spent in rollout,
reference and train; `check` is what libraries that do the same work agree in.

`--peers` runs Tunix 0.1.7 and TRL 1.16 (generation: transformers) on the same work, taking turns
with purepost over `--rounds` rounds, and prints for each peer the ratios of time, tokens/s and
peak memory, purepost / peer, as the median over the rounds and the lowest and highest round.
Their environments are made on first use (4 GB), below $PUREPOST_CACHE or ~/.cache/purepost.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .work import FIGURES, MODELS, PEERS

ROOT = Path(__file__).parents[2]
OURS = "purepost"
PACKAGE = "experiments.benchmarks"
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # Linux only: fewer misses in walking through the weights
Line = dict[str, Any]


def environment(*, cpu: bool, threads: int) -> dict[str, str]:
    """The environment of a measuring process: our code on the path, no compiled code of old runs,
    memory in huge pages, and peers that look nothing up on the network.
    """
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": HUGE_PAGES,
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        **dict.fromkeys(offline, "1"),
        **({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if cpu else {}),
    }


def last_line(command: Sequence[str], environ: Mapping[str, str]) -> Line | None:
    """The last line of a program's output, read as JSON; None, and its complaint, if it fails."""
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    complaint = "\n".join(run.stderr.splitlines()[-15:])
    print(f"{' '.join(command)} ended with {run.returncode}:\n{complaint}", file=sys.stderr)
    return None


def ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Ours / theirs: the median, lowest and highest round."""
    values = [ours / theirs for ours, theirs in pairs]
    spread = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {k: round(v, 3) for k, v in spread.items()}


def compare(figure: str, model: str, peer: str, rounds: Sequence[Mapping[str, Line]]) -> Line:
    """The ratios of one figure, from rounds in which both libraries were measured."""
    pairs = [(lines[OURS], lines[peer]) for lines in rounds]

    def of(name: str) -> dict[str, float]:
        return ratio([(ours[name], theirs[name]) for ours, theirs in pairs])

    return {
        "figure": figure,
        "model": model,
        "ratio": f"{OURS}/{peer}",
        "seconds": of("seconds"),
        "tokens_per_second": of("tokens_per_second"),
        "peak_memory_gib": of("peak_memory_gib"),
        "rounds": len(pairs),
        "checks": {OURS: pairs[0][0]["check"], peer: pairs[0][1]["check"]},
    }


def measure(
    figure: str, model: str, commands: Mapping[str, Sequence[str]], rounds: int, environ: Any
) -> Iterator[Line | None]:
    """The lines of one figure: each library's in every round, then the ratios. None: a failure."""
    work = FIGURES[figure]
    shapes = {k: v for k, v in asdict(work).items() if k != "warmups"}
    done: list[dict[str, Line]] = []
    for i in range(rounds):
        done.append({})
        for library, command in commands.items():
            found = last_line(command, environ)
            if found is None:
                yield None
                continue
            done[-1][library] = found
            names = {"figure": figure, "library": library, "model": model, "round": i}
            yield {**names, "shapes": shapes, **found}
    for peer in commands:
        both = [lines for lines in done if peer in lines and OURS in lines]
        if peer != OURS and both:
            yield compare(figure, model, peer, both)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, as in the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--only", choices=list(FIGURES), nargs="+", default=list(FIGURES))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps in each process")
    parser.add_argument("--threads", type=int, default=2, help="CPUs")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="also these; alone: all")
    parser.add_argument("--rounds", type=int, help="turns; by default 3 with peers, else 1")
    options = parser.parse_args(arguments)
    for name in ("repeats", "threads", "rounds"):
        value = vars(options)[name]
        if value is not None and value < 1:
            parser.error(f"expected --{name} ≥ 1, got {value}")
    if options.peers == []:
        options.peers = list(PEERS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if something could not be measured."""
    options = parse(arguments)
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cpus[: options.threads])
    environ = environment(cpu=bool(options.peers), threads=options.threads)
    rounds = options.rounds or (3 if options.peers else 1)
    complete = True
    for model in options.model:
        place: Line | None = {"model": model, "python": {}}
        if options.peers:
            place = last_line(
                [sys.executable, "-m", f"{PACKAGE}.prepare", model, *options.peers], environ
            )
        if place is None:
            return 1
        for figure in options.only:
            tail = [figure, place["model"], str(options.repeats)]
            commands = {OURS: [sys.executable, "-m", f"{PACKAGE}.ours", *tail]}
            for peer, python in place["python"].items():
                commands[peer] = [python, "-m", f"{PACKAGE}.peers.{peer}_run", *tail]
            for line in measure(figure, model, commands, rounds, environ):
                complete &= line is not None
                if line is not None:
                    print(json.dumps(line), flush=True)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
