"""How full continuous batching keeps its slots, and what that is worth: a JSON line for each
measurement, then the ratios.

    python -m experiments.benchmarks.engine                      the tiny Llama: some minutes
    python -m experiments.benchmarks.engine --model smollm2      an hour on two CPUs

    heavy-tail   completions of 8 to 256 tokens, as many tokens in each octave: by the engine, and
                 in batches that last as long as their longest
    branches     8 completions of each of some long prompts, all of one length: what `generate` is
                 best at, since it reads a prompt once for all its branches
    guesses      one greedy row, with and without guessing (rollout/speculative.py)

Both ways are measured in turns in one process, after a warm-up that compiles. `occupancy` is the
share of slots that had a row to decode, over all steps; `best` is what slots that never wait would
have of the same requests in the same order: what it lacks is the tail, when none are left.
"""

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.random as jr
import numpy as np

from purepost.models import Decoder
from purepost.rollout.draw import Sampling
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.requests import Request, key_data, requests_for
from purepost.rollout.sample import Prompts, generate, pad_prompts
from purepost.text.tokenizer import Tokenizer

from .measure import processor, threads
from .models import load_model, prompts_for
from .step import ratio

SLOTS, WIDTH = 8, 32
SIZES = (8, 16, 32, 64, 128, 256)
Measured = dict[str, float]  # tokens, and occupancy where it is known


@dataclass(frozen=True)
class Contest:
    """Two ways to do the same work: `ours` against `theirs`."""

    figure: str
    ours: tuple[str, Callable[[], Measured]]
    theirs: tuple[str, Callable[[], Measured]]


def lengths_of(count: int) -> list[int]:
    """A heavy tail: as many tokens in each octave."""
    shares = 1 / np.asarray(SIZES)
    return np.random.default_rng(0).choice(SIZES, count, p=shares / shares.sum()).tolist()


def best_occupancy(lengths: Sequence[int], slots: int) -> float:
    """The share of slots that are busy when each takes the next request as soon as it is free."""
    free = [0] * slots  # when, in steps
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return sum(lengths) / (slots * max(free))


def take(prompts: Prompts, start: int, stop: int) -> Prompts:
    """Some of the prompts, in turn."""
    index = np.arange(start, stop) % len(prompts.ids)
    return jax.tree.map(lambda x: x[index], prompts)


def engine_run(engine: Engine, model: Decoder, requests: Sequence[Request]) -> Measured:
    """A run with new weights, as after a training step: tokens, and the run's occupancy."""
    engine.update(model)
    stats, slots = engine.stats, engine.limits.slots
    steps, busy = stats.steps, stats.busy
    results = engine.run(requests)
    tokens = sum(len(r.tokens) for r in results)
    steps, busy = stats.steps - steps, stats.busy - busy
    return {"tokens": tokens, "occupancy": round(busy / (steps * slots), 4), "steps": steps}


def heavy_tail(model: Decoder, prompts: Prompts, count: int) -> Contest:
    """The engine against batches in the order in which requests come."""
    lengths = lengths_of(count)
    engine = Engine(model, Limits(slots=SLOTS, room=512, prefix_bytes=0))
    requests = [
        Request(i, _ids(prompts, i), key_data(jr.key(i)), Sampling(n))
        for i, n in enumerate(lengths)
    ]

    def static() -> Measured:
        steps = 0
        for start in range(0, count, SLOTS):
            longest = max(lengths[start : start + SLOTS])
            batch = take(prompts, start, start + SLOTS)
            generate(jr.key(0), model, batch, Sampling(longest)).tokens.block_until_ready()
            steps += longest
        share = sum(lengths) / (steps * SLOTS)
        return {"tokens": sum(lengths), "occupancy": round(share, 4), "steps": steps}

    def continuous() -> Measured:
        best = round(best_occupancy(lengths, SLOTS), 4)
        return engine_run(engine, model, requests) | {"best": best}

    return Contest("heavy-tail", ("engine", continuous), ("static", static))


def branches(model: Decoder, prompts: Prompts, count: int) -> Contest:
    """The engine, where nothing is uneven."""
    sampling, group = Sampling(64), 8
    few = take(prompts, 0, count)
    engine = Engine(model, Limits(slots=SLOTS * group, room=512))
    requests = requests_for(jr.key(0), few, sampling, group=group)

    def static() -> Measured:
        done = generate(jr.key(0), model, few, sampling, group=group)
        return {"tokens": int(done.lengths.sum()), "occupancy": 1.0, "steps": 64}

    return Contest(
        "branches", ("engine", lambda: engine_run(engine, model, requests)), ("static", static)
    )


def guesses(model: Decoder, prompts: Prompts) -> Contest:
    """One row, greedily."""
    requests = [Request(0, _ids(prompts, 0), key_data(jr.key(0)), Sampling(192, temperature=0.0))]
    engines = [Engine(model, Limits(slots=1, room=512, guesses=n)) for n in (4, 0)]
    with_, without = (lambda e=e: engine_run(e, model, requests) for e in engines)
    return Contest("guesses", ("guessing", with_), ("plain", without))


def _ids(prompts: Prompts, i: int) -> list[int]:
    row = i % len(prompts.ids)
    return np.asarray(prompts.tokens[row, : int(prompts.lengths[row])]).tolist()


def measure(contest: Contest, rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each way in every round, then their ratio."""
    seconds: dict[str, list[float]] = {}
    for name, run in (contest.ours, contest.theirs):
        run()
        seconds[name] = []
    for i in range(rounds):
        for name, run in (contest.ours, contest.theirs):
            start = time.perf_counter()
            found = run()
            took = time.perf_counter() - start
            seconds[name].append(took)
            yield {
                "figure": contest.figure,
                "way": name,
                "round": i,
                "seconds": round(took, 4),
                "tokens_per_second": round(found["tokens"] / took, 1),
                **found,
            }
    ours, theirs = contest.ours[0], contest.theirs[0]
    pairs = list(zip(seconds[theirs], seconds[ours], strict=True))
    yield {"figure": contest.figure, "speed": f"{ours}/{theirs}", **ratio(pairs)}


def contests(model: Decoder, tokenizer: Tokenizer, requests: int) -> Iterator[Contest]:
    """All figures, each made when the one before is done."""
    short, long = (
        pad_prompts([p.ids for p in prompts_for(tokenizer, count=16, width=n)], width=n)
        for n in (WIDTH, 4 * WIDTH)
    )
    yield heavy_tail(model, short, requests)
    yield branches(model, long, 8)
    yield guesses(model, short)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--requests", type=int, default=512, help="of the heavy tail")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.requests < SLOTS or options.requests % SLOTS:
        parser.error(f"expected --requests to be a multiple of {SLOTS}, got {options.requests}")
    if options.rounds < 1:
        parser.error(f"expected --rounds ≥ 1, got {options.rounds}")
    loaded = load_model(options.model)
    place = {"model": options.model, "device": processor(), "threads": threads()}
    for contest in contests(loaded.model, loaded.tokenizer, options.requests):
        for line in measure(contest, options.rounds):
            print(json.dumps(line | place), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
