"""How fast a step is, and how much memory it takes: one JSON line for every figure.

    python -m experiments.benchmarks.step                       every figure, both models
    python -m experiments.benchmarks.step --model tiny --only sft-full grpo --repeats 9
    python -m experiments.benchmarks.step --peers               beside Tunix, TRL and torch
    python -m experiments.benchmarks.step --peers tunix         beside Tunix alone

Every figure is measured in a process of its own, so that its peak memory is its own: some warm-up
steps that compile, then `--repeats` timed ones, of which those during which other processes used
the CPU are left out. Everything is float32, on `--threads` CPUs; AdamW, gradients clipped at 1.

    sft-full            SFT of the whole model, 4 rows of 256 tokens
    sft-lora            the same with adapters of rank 16 on every linear layer
    generate-greedy     8 prompts of 64 tokens, 128 more of each, greedily
    generate-sample     the same at temperature 1
    score               log-probabilities of 4 rows of 256 tokens by frozen weights
    generate-branches   8 completions of each of 8 prompts, 64 + 64 tokens, at temperature 1
    generate-branches-long
                        the same behind prompts of 256 tokens
    grpo                4 completions of each of 4 prompts, 64 + 64 tokens, and one optimizer step
                        of GRPO with a reference (β = .04)
    grpo-fused          the same as one XLA program (of purepost; peers step as they do)
    grpo-long           8 completions of each of 4 prompts, 256 + 64 tokens, and such a step

All libraries run in one environment, with memory in huge pages where glibc gives them.
Completions do not end early; a reward reads their text (in the fused step it counts the same by
token id); metrics of every training step are written to a file. A line's `parts` are the seconds a
GRPO step spent in rollout, reference and train; `programs` are those that JAX made; `check` is what
libraries that do the same work agree in: where a loss or log-probability of the same rows is more
than 1e-3 (relative) from a peer's, or a length differs, the script says so and ends with 1.

`--peers` runs Tunix 0.1.7, TRL 1.16 (generation and scoring: transformers) and torch (of sft-full
alone: a plain loop with torch.compile) on the same work, taking turns with purepost over `--rounds`
rounds, and prints for each peer the ratios of time, tokens/s and peak memory, purepost / peer, as
the median over the rounds and the lowest and highest round. A library that takes more than
`--memory` GiB (by default 85% of the machine's) for a GRPO step is run again with its gradient
added up over micro-batches, as few as fit; `microbatches` says how many.
Their environments are made on first use (4 GB), below $PUREPOST_CACHE or ~/.cache/purepost.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .measure import GIB, high_water
from .work import FIGURES, MODELS, PEERS, does, splits

ROOT = Path(__file__).parents[2]
OURS = "purepost"
PACKAGE = "experiments.benchmarks"
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # Linux only: fewer misses in walking through the weights
AGREE = {"loss": 1e-3, "logp": 1e-3, "length": 0.0}  # how far checks may differ, relative
# What XLA, torch and Python say when there is no more memory to take.
NO_MEMORY = ("RESOURCE_EXHAUSTED", "DefaultCPUAllocator", "OutOfMemoryError", "MemoryError")
LOOK = 0.5  # seconds between looks at a process's memory
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


def last_line(
    command: Sequence[str], environ: Mapping[str, str], most: float = float("inf")
) -> Line | None:
    """The last line of a program's output, read as JSON; None, and its complaint, if it fails.

    MemoryError: it was killed for want of memory, stopped because it took more than `most` GiB, or
    ended because it could not have what it asked for.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=environ)
        try:
            while process.poll() is None:
                if (high_water(process.pid) or 0.0) > most:
                    process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
        finally:
            process.kill()
        if process.returncode == -9:
            raise MemoryError(f"it took more than {most:.1f} GiB, or there was no more to take")
        out.seek(0)
        err.seek(0)
        if process.returncode == 0:
            return json.loads(out.read().splitlines()[-1])
        complaint = "\n".join(err.read().splitlines()[-15:])
    if any(words in complaint for words in NO_MEMORY):
        raise MemoryError(complaint.splitlines()[-1])
    print(f"{' '.join(command)} ended with {process.returncode}:\n{complaint}", file=sys.stderr)
    return None


def ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Ours / theirs: the median, lowest and highest round."""
    values = [ours / theirs for ours, theirs in pairs]
    spread = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {k: round(v, 3) for k, v in spread.items()}


def disagreements(ours: Line | None, theirs: Line | None) -> list[str]:
    """The checks that two libraries differ in by more than they may."""
    pairs = {k: ((ours or {}).get(k), (theirs or {}).get(k)) for k in AGREE}
    return [
        f"{name}: {a} here, {b} there"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and abs(a - b) > AGREE[name] * abs(b)
    ]


def compare(figure: str, model: str, peer: str, rounds: Sequence[Mapping[str, Line]]) -> Line:
    """The ratios of one figure, from rounds in which both libraries were measured."""
    pairs = [(lines[OURS], lines[peer]) for lines in rounds]

    def of(name: str) -> dict[str, float]:
        return ratio([(ours[name], theirs[name]) for ours, theirs in pairs])

    ours, theirs = pairs[0]
    return {
        "figure": figure,
        "model": model,
        "ratio": f"{OURS}/{peer}",
        "seconds": of("seconds"),
        "tokens_per_second": of("tokens_per_second"),
        "peak_memory_gib": of("peak_memory_gib"),
        "rounds": len(pairs),
        "checks": {OURS: ours["check"], peer: theirs["check"]},
        "disagreements": disagreements(ours["check"], theirs["check"]),
        "microbatches": {OURS: ours["microbatches"], peer: theirs["microbatches"]},
    }


def fitting(
    figure: str,
    library: str,
    command: Sequence[str],
    environ: Any,
    most: float,
    known: dict[str, int],
) -> Line | None:
    """A library's line, its step split into as few micro-batches as fit into `most` GiB. `known` is
    what was found before, by library.
    """
    for microbatches in splits(FIGURES[figure]):
        if microbatches < known.get(library, 1):
            continue
        known[library] = microbatches
        try:
            found = last_line([*command, str(microbatches)], environ, most)
        except MemoryError as error:
            print(f"{figure} by {library}, micro-batches: {microbatches}: {error}", file=sys.stderr)
        else:
            return found and {"microbatches": microbatches, **found}
    return None


def measure(
    figure: str,
    model: str,
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    environ: Any,
    most: float = float("inf"),
) -> Iterator[Line | None]:
    """The lines of one figure: each library's in every round, then the ratios. None: a failure."""
    work = FIGURES[figure]
    shapes = {k: v for k, v in asdict(work).items() if k not in ("warmups", "microbatches")}
    done: list[dict[str, Line]] = []
    known: dict[str, int] = {}
    for i in range(rounds):
        done.append({})
        for library, command in commands.items():
            found = fitting(figure, library, command, environ, most, known)
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


def memory() -> float:
    """Most of this machine's memory, in GiB."""
    return 0.85 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, as in the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--only", choices=list(FIGURES), nargs="+", default=list(FIGURES))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps in each process")
    parser.add_argument("--threads", type=int, default=2, help="CPUs")
    parser.add_argument("--memory", type=float, default=memory(), help="GiB a process may take")
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


def pin(threads: int) -> None:
    """Keep this process, and those that it starts, to so many CPUs."""
    if sys.platform == "linux":
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cpus[:threads])


def prepared(model: str, peers: Sequence[str], environ: Any) -> Line | None:
    """Where a model and the interpreters of the peers are; None if they could not be made."""
    if not peers:
        return {"model": model, "python": {}}
    return last_line([sys.executable, "-m", f"{PACKAGE}.prepare", model, *peers], environ)


def commands_of(figure: str, place: Line, repeats: int) -> dict[str, list[str]]:
    """The command of each library that does the work."""
    tail = [figure, place["model"], str(repeats)]
    commands = {OURS: [sys.executable, "-m", f"{PACKAGE}.ours", *tail]}
    for peer, python in place["python"].items():
        if does(peer, FIGURES[figure]):
            commands[peer] = [python, "-m", f"{PACKAGE}.peers.{peer}_run", *tail]
    return commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if something could not be measured, or libraries disagree."""
    options = parse(arguments)
    pin(options.threads)
    environ = environment(cpu=bool(options.peers), threads=options.threads)
    rounds = options.rounds or (3 if options.peers else 1)
    complete = True
    for model in options.model:
        place = prepared(model, options.peers or [], environ)
        if place is None:
            return 1
        for figure in options.only:
            commands = commands_of(figure, place, options.repeats)
            for line in measure(figure, model, commands, rounds, environ, options.memory):
                complete &= line is not None and not line.get("disagreements")
                if line is not None:
                    print(json.dumps(line), flush=True)
                    for fault in line.get("disagreements", ()):
                        print(f"{figure}, {line['ratio']} disagree: {fault}", file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
