"""How the cost of a step grows with its size: a JSON line for every axis, with a fitted exponent.

    python -m experiments.benchmarks.scaling                     all axes: some minutes on two CPUs
    python -m experiments.benchmarks.scaling --only length vocabulary --repeats 9

    batch        SFT of 1 to 16 rows of 128 tokens
    length       SFT of 2 rows of 64 to 1024 tokens
    vocabulary   SFT of 4 rows of 128 tokens, over 512 to 65,536 ids
    group        a GRPO step of 2 to 16 completions of each of 2 prompts, 128 + 32 tokens, with a
                 reference

Everything else is that of the tiny Llama (random weights, float32; AdamW). `seconds` are medians of
steps after one that compiles; `exponent` is k in seconds ∝ size^k by least squares of logarithms,
`last` the same of the two largest sizes alone, where what is constant weighs least.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from purepost import Algorithm, train
from purepost.algorithms import sft
from purepost.mean import Metrics
from purepost.models import Config, Decoder, init_decoder, with_reference
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, Prompts
from purepost.weights import add_lora

from ..common import use_compile_cache
from .measure import processor, threads, versions
from .models import TINY
from .ours import PACKAGES, grpo_of, optimizer, rows_of
from .work import LORA_ALPHA, SFT_RATE, Generate, Grpo, Sft

Prepared = tuple[Algorithm[Any, Any, Any], Any, Any]  # and the models, and a step's data


@dataclass(frozen=True)
class Axis:
    """The sizes that are tried, and the work and the model of each."""

    sizes: tuple[int, ...]
    work: Callable[[int], Sft | Grpo]
    model: Callable[[int], Config] = lambda size: TINY


AXES: dict[str, Axis] = {
    "batch": Axis((1, 2, 4, 8, 16), lambda n: Sft(n, 128)),
    "length": Axis((64, 128, 256, 512, 1024), lambda n: Sft(2, n)),
    "vocabulary": Axis(
        (512, 4096, 16384, 65536), lambda n: Sft(4, 128), lambda n: replace(TINY, vocab_size=n)
    ),
    "group": Axis((2, 4, 8, 16), lambda n: Grpo(2, 128, 32, group=n)),
}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """k of seconds ∝ size^k, by least squares of logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def prompts_of(work: Generate | Grpo, vocab_size: int) -> Prompts:
    """Random prompts, full of tokens."""
    tokens = jr.randint(jr.key(1), (work.prompts, work.width), 3, vocab_size, jnp.int32)
    lengths = jnp.full(work.prompts, work.width, jnp.int32)
    return Prompts(tokens, lengths, jnp.arange(work.prompts, dtype=jnp.int32))


def prepare(work: Sft | Grpo, model: Decoder) -> Prepared:
    """The algorithm, the models that it trains, and a step's data."""
    vocab_size = model.config.vocab_size
    match work:
        case Sft():
            if work.rank is not None:
                model = add_lora(model, rank=work.rank, alpha=LORA_ALPHA, key=jr.key(2))
            return sft(optimizer(SFT_RATE)), model, rows_of(work, vocab_size, 1)[0]
        case Grpo():

            def reward(tasks: Tasks, completions: Completions) -> tuple[Any, Metrics]:
                return (completions.tokens % 2).mean(-1, dtype=jnp.float32), {}

            collect = single_turn(reward, Sampling(work.new), group=work.group)
            data = Tasks(prompts_of(work, vocab_size))
            return grpo_of(work, collect), with_reference(model), data


def seconds_of(prepared: Prepared, repeats: int) -> float:
    """The median of so many steps, after one that compiles."""
    algorithm, models, data = prepared
    start, marks = algorithm.init(jr.key(1), models), []
    for _, state, metrics in train(
        algorithm, start, lambda step: data, key=jr.key(0), steps=repeats + 1
    ):
        jax.block_until_ready((state, metrics))
        marks.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(marks, marks[1:], strict=False))


def measure(axis: Axis, repeats: int) -> dict[str, Any]:
    """What an axis's line says."""
    seconds = []
    for size in axis.sizes:
        model = init_decoder(jr.key(0), axis.model(size))
        seconds.append(seconds_of(prepare(axis.work(size), model), repeats))
        jax.clear_caches()
    return {
        "sizes": list(axis.sizes),
        "seconds": [round(s, 5) for s in seconds],
        "exponent": round(exponent(axis.sizes, seconds), 3),
        "last": round(exponent(axis.sizes[-2:], seconds[-2:]), 3),
        "smallest": asdict(axis.work(axis.sizes[0])),
    }


def lines(names: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """The line of each axis."""
    device = jax.devices()[0]
    place = {
        "dtype": "float32",
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "threads": threads(),
        "versions": versions(PACKAGES),
    }
    for name in names:
        yield {"figure": "scaling", "axis": name, **measure(AXES[name], repeats), **place}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(AXES), nargs="+", default=list(AXES))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each size")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"expected --repeats ≥ 1, got {options.repeats}")
    use_compile_cache()
    for line in lines(options.only, options.repeats):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
