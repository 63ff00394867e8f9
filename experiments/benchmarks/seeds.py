"""What eight seeds of a small reinforcement-learning run cost, one by one and as one program: a
JSON line for every size of model, then where vmap pays.

    python -m experiments.benchmarks.seeds                     some minutes on two CPUs
    python -m experiments.benchmarks.seeds --hidden 16 32 --steps 20

The run is that of experiments/fused_seeds.py, with 4 completions of each of 4 prompts, on a decoder
of two layers. Four ways, in turns:

    loop    `train(..., fused=True)`, a seed after another: a program a step
    scan    a program for all steps of a seed, seed after seed
    map     one program: lax.map over the seeds, each to the bit its single run
    vmap    one program: all seeds at once

`vmap/loop` and the like are ratios of seconds, compilation left out: the median over the rounds,
the lowest, the highest. `pays` names the widths at which vmap takes at most .8 of a way's time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int

from purepost import train, tree
from purepost.models import Config as Model
from purepost.models import init_decoder

from ..common import restart_without_fusions, use_compile_cache
from ..fused_seeds import Config, algorithm_of, begin, draw_tasks, make_run
from .measure import processor, threads, versions
from .ours import PACKAGES
from .step import ratio

PAYS = 0.8
Way = Callable[[], Any]


def config_of(hidden: int, steps: int) -> Config:
    """The run with a decoder of this width."""
    model = Model(
        vocab_size=12,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=hidden // 4,
        max_positions=32,
    )
    return replace(Config(), steps=steps, prompts=4, group=4, model=model)


def loop(config: Config) -> Callable[[Int[Array, ""]], Any]:
    """seed → the reward of every step, a fused step after another."""
    algorithm = algorithm_of(config, config.learning_rate, config.clip)
    start = jax.jit(lambda seed: begin(config, algorithm, seed))
    draw = jax.jit(lambda key, step: draw_tasks(jr.fold_in(key, step), config))

    def run(seed: Int[Array, ""]) -> Any:
        state, k_data, k_train = start(seed)
        data = lambda step: draw(k_data, step)  # noqa: E731
        going = train(algorithm, state, data, key=k_train, steps=config.steps, fused=True)
        return [metrics["reward"].value for _, _, metrics in going]

    return run


def ways(config: Config) -> dict[str, Way]:
    """Each way to run all seeds."""
    seeds = jnp.arange(config.seeds, dtype=jnp.int32)
    run, one = make_run(config), loop(config)
    scan, mapped = jax.jit(run), jax.jit(lambda s: jax.lax.map(run, s))
    vmapped = jax.jit(jax.vmap(run))
    return {
        "loop": lambda: [one(seed) for seed in seeds],
        "scan": lambda: [scan(seed) for seed in seeds],
        "map": lambda: mapped(seeds),
        "vmap": lambda: vmapped(seeds),
    }


def measure(config: Config, rounds: int) -> dict[str, Any]:
    """What a width's line says: the seconds of every way in every round, and their ratios."""
    all_ways = ways(config)
    seconds: dict[str, list[float]] = {name: [] for name in all_ways}
    for _ in range(rounds + 1):
        for name, way in all_ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way())
            seconds[name].append(time.perf_counter() - start)
    timed = {name: each[1:] for name, each in seconds.items()}  # the first compiles
    return {
        "seconds": {name: [round(s, 4) for s in each] for name, each in timed.items()},
        **{
            f"vmap/{name}": ratio(list(zip(timed["vmap"], each, strict=True)))
            for name, each in timed.items()
            if name != "vmap"
        },
    }


def pays(lines: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """The widths at which vmap takes at most PAYS of another way's time, by that way."""
    return {
        way: [line["hidden"] for line in lines if line[f"vmap/{way}"]["median"] <= PAYS]
        for way in ("loop", "scan", "map")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 1:
        parser.error(f"expected --steps and --rounds ≥ 1, got {options.steps, options.rounds}")
    if any(hidden < 8 or hidden % 8 for hidden in options.hidden):
        parser.error(f"expected --hidden in multiples of 8, for four heads, got {options.hidden}")
    use_compile_cache()
    place = {"device": processor(), "threads": threads(), "versions": versions(PACKAGES)}
    lines = []
    for hidden in options.hidden:
        config = config_of(hidden, options.steps)
        names = {
            "figure": "seeds",
            "hidden": hidden,
            "parameters": tree.count(init_decoder(jr.key(0), config.model)),
            "seeds": config.seeds,
            "steps": config.steps,
            "shapes": {"prompts": config.prompts, "group": config.group, "new": config.length},
            "dtype": "float32",
        }
        lines.append(names | measure(config, options.rounds) | place)
        print(json.dumps(lines[-1]), flush=True)
        jax.clear_caches()
    print(json.dumps({"figure": "seeds", "at_most": PAYS, "pays": pays(lines)}), flush=True)
    return 0


if __name__ == "__main__":
    restart_without_fusions()
    sys.exit(main())
