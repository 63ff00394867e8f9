"""How long one waits for the first step, and how many programs are compiled for it: a JSON line for
every figure and library, then the ratios.

    python -m experiments.benchmarks.compile                     SFT and GRPO on the tiny Llama
    python -m experiments.benchmarks.compile --peers tunix       beside Tunix
    python -m experiments.benchmarks.compile --model smollm2 --only grpo

The figures are those of experiments.benchmarks.step. Each is run twice in processes of their own:
`cold`, with an empty compile cache, and `cached`, with the one that the first run left, as the
experiments keep theirs. `process_seconds` go from the start of the process to the end of the first
step; `programs` are those made until the last of a few steps: how many, how many of these came from
the cache, and the seconds that this took.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from .step import OURS, Line, commands_of, environment, last_line, pin, prepared, ratio
from .work import FIGURES, MODELS

WAYS = ("cold", "cached")
KEPT = ("process_seconds", "first_step_seconds", "load_seconds", "programs", "device", "versions")


def with_cache(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """The environment, with a compile cache: what took half a second is kept, as in experiments."""
    return {
        **environ,
        "JAX_COMPILATION_CACHE_DIR": directory,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


def measure(
    names: Line, commands: Mapping[str, Sequence[str]], rounds: int, environ: Mapping[str, str]
) -> Iterator[Line | None]:
    """The lines of one figure: each library's, cold and cached, in every round, then the ratios.
    None: a failure.
    """
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    for i in range(rounds):
        for library, command in commands.items():
            with tempfile.TemporaryDirectory() as directory:
                for way in WAYS:
                    found = last_line(command, with_cache(environ, directory))
                    if found is None:
                        yield None
                        break
                    seconds.setdefault((library, way), {})[i] = found["process_seconds"]
                    kept = {name: found[name] for name in KEPT}
                    yield {**names, "library": library, "way": way, "round": i, **kept}
    for way in WAYS:
        ours = seconds.get((OURS, way), {})
        for peer in commands:
            theirs = seconds.get((peer, way), {})
            pairs = [(ours[i], theirs[i]) for i in ours if i in theirs]
            if peer != OURS and pairs:
                name = f"{OURS}/{peer}"
                yield {**names, "ratio": name, "way": way, "process_seconds": ratio(pairs)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, as in the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["tiny"])
    parser.add_argument("--only", choices=list(FIGURES), nargs="+", default=["sft-full", "grpo"])
    parser.add_argument("--peers", choices=["tunix"], nargs="*", default=[], help="also these")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="CPUs")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"expected --rounds and --threads ≥ 1, got {options.rounds, options.threads}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if something could not be measured."""
    options = parse(arguments)
    pin(options.threads)
    environ = environment(cpu=bool(options.peers), threads=options.threads)
    complete = True
    for model in options.model:
        place = prepared(model, options.peers, environ)
        if place is None:
            return 1
        for figure in options.only:
            names = {"figure": figure, "model": model}
            commands = commands_of(figure, place, repeats=1)
            for line in measure(names, commands, options.rounds, environ):
                complete &= line is not None
                if line is not None:
                    print(json.dumps(line), flush=True)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
