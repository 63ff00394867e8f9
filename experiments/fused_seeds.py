"""A whole reinforcement-learning run as one XLA program, and eight seeds of it in another.

    python experiments/fused_seeds.py        (or python -m experiments.fused_seeds)

A decoder of some 200,000 parameters learns from scratch, by GRPO, to name the largest of four
digits, four times over; the reward is the share of its tokens that do. Sampling, reward,
advantages, loss and update are one program (`fuse`), and so is the scan over all steps. `lax.map`
over seeds gives each seed's single run to the bit; `vmap` gives the same up to rounding, at
the speed that it prints. Every seed's curve, with the interval over seeds, is drawn to
runs/fused_seeds.png.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int

if __package__ is None or __package__ == "":  # run as a file: the root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import ROOT, half_width, use_compile_cache
from purepost import Algorithm, TrainState, fuse
from purepost.algorithms import grpo
from purepost.losses import clipped
from purepost.mean import Metrics
from purepost.models import Config as Model
from purepost.models import Decoder, WithReference, init_decoder
from purepost.policy_batch import PolicyBatch
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, Prompts
from purepost.types import KeyArray, Scalar

DIGITS = 10
START = 10  # the token in front of the digits


@dataclass(frozen=True)
class Config:
    """The run. Sizes in prompts, completions, digits, steps."""

    seeds: int = 8
    steps: int = 200
    prompts: int = 16
    group: int = 8
    length: int = 4
    epochs: int = 1
    learning_rate: float = 3e-3
    clip: float = 0.2  # how far the ratio may go from 1; of no account in a single epoch
    entropy: float = 0.02  # weight of the bonus, per nat
    model: Model = Model(
        vocab_size=12,
        hidden_size=64,
        intermediate_size=192,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_positions=32,
    )


def largest(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
    """The share of the completion's tokens that are the largest of the prompt's digits."""
    wanted = tasks.prompts.tokens[:, 1:].max(-1)
    hits = (completions.tokens == wanted[:, None, None]) & completions.mask
    return hits.astype(jnp.float32).mean(-1), {}


def draw_tasks(key: KeyArray, config: Config) -> Tasks:
    """A step's prompts: START and random digits."""
    p, n = config.prompts, config.length
    digits = jr.randint(key, (p, n), 0, DIGITS, jnp.int32)
    tokens = jnp.concatenate([jnp.full((p, 1), START, jnp.int32), digits], 1)
    lengths = jnp.full(p, n + 1, jnp.int32)
    return Tasks(Prompts(tokens, lengths, jnp.arange(p, dtype=jnp.int32)))


def algorithm_of(
    config: Config, learning_rate: Scalar, clip: Scalar
) -> Algorithm[WithReference[Decoder], Tasks, PolicyBatch]:
    """GRPO with these two, which may be traced."""
    collect = single_turn(largest, Sampling(max_tokens=config.length), group=config.group)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0)
    )
    objective = partial(clipped, low=clip, high=clip)
    return grpo(
        optimizer, collect, objective=objective, entropy=config.entropy, epochs=config.epochs
    )


def begin(
    config: Config, algorithm: Algorithm[Any, Any, Any], seed: Int[Array, ""]
) -> tuple[TrainState[Any], KeyArray, KeyArray]:
    """(the first state, the key of the data, the key of the training) of a seed."""
    k_model, k_init, k_data, k_train = jr.split(jr.key(seed), 4)
    models = WithReference(init_decoder(k_model, config.model))
    return algorithm.init(k_init, models), k_data, k_train


def whole_run(
    config: Config, seed: Int[Array, ""], learning_rate: Scalar, clip: Scalar
) -> Float[Array, " s"]:
    """The mean reward of every step of a run: initialisation and all steps, a pure function."""
    algorithm = algorithm_of(config, learning_rate, clip)
    state, k_data, k_train = begin(config, algorithm, seed)
    step = fuse(algorithm)

    def body(state, i):
        data = draw_tasks(jr.fold_in(k_data, i), config)
        state, metrics = step(jr.fold_in(k_train, i), state, data)
        return state, metrics["reward"].value

    return jax.lax.scan(body, state, jnp.arange(config.steps, dtype=jnp.int32))[1]


def make_run(config: Config) -> Callable[[Int[Array, ""]], Float[Array, " s"]]:
    """seed → the mean reward of every step."""
    return lambda seed: whole_run(config, seed, config.learning_rate, config.clip)


def timed(
    function: Callable[[Array], Array], seeds: Array
) -> tuple[Float[np.ndarray, "..."], float, float]:
    """(what it gives, seconds to compile, seconds to run)."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(seeds).compile()
    middle = time.perf_counter()
    out = np.asarray(jax.block_until_ready(compiled(seeds)))
    return out, middle - start, time.perf_counter() - middle


def draw(curves: Float[np.ndarray, "n s"], path: Path) -> None:
    """Every seed's curve, their mean, and its 95% interval (Student's t over seeds)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n, steps = curves.shape
    mean, half = curves.mean(0), half_width(curves)
    x = np.arange(1, steps + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(x, curves.T, color="#2f6db3", alpha=0.25, linewidth=0.8)
    axis.fill_between(x, mean - half, mean + half, color="#d9722e", alpha=0.3, linewidth=0)
    axis.plot(x, mean, color="#d9722e", linewidth=1.8, label=f"mean of {n} seeds, 95% interval")
    axis.set(xlabel="step", ylabel="reward: share of tokens that are right", ylim=(0, 1.02))
    axis.set_title("GRPO from scratch: the largest of four digits", loc="left", fontweight="bold")
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(config: Config) -> None:
    """Run one seed alone, then all by map and by vmap, and compare."""
    use_compile_cache()
    run = make_run(config)
    seeds = jnp.arange(config.seeds, dtype=jnp.int32)
    single, compiling, alone = timed(run, seeds[0])
    print(f"one seed alone: {alone:.1f} s for {config.steps} steps (compiled in {compiling:.1f} s)")
    singles = [single] + [np.asarray(jax.jit(run)(s)) for s in seeds[1:]]
    mapped, _, by_map = timed(lambda s: jax.lax.map(run, s), seeds)
    vmapped, _, by_vmap = timed(jax.vmap(run), seeds)
    same = [bool(np.array_equal(a, b)) for a, b in zip(singles, mapped, strict=True)]
    print(
        f"lax.map over {config.seeds} seeds: {by_map:.1f} s; equal to its single run, to the bit:"
    )
    for seed, equal in enumerate(same):
        start, end = mapped[seed, :5].mean(), mapped[seed, -5:].mean()
        print(f"  seed {seed}: reward {start:.3f} → {end:.3f}   {'equal' if equal else 'DIFFERS'}")
    last = mapped[:, -5:].mean(1)
    half = half_width(last)
    print(f"  reward at the end, mean over seeds: {last.mean():.3f} ± {half:.3f} (95%)")
    first = np.abs(mapped[:, 0] - vmapped[:, 0]).max()
    steps = config.seeds * config.steps
    print(
        f"vmap over {config.seeds} seeds: {by_vmap:.1f} s, {steps / by_vmap:.0f} steps/s, "
        f"{by_map / by_vmap:.2f}× the speed of map; first step's rewards differ by {first:.1e}, "
        f"the last's mean by {abs(mapped[:, -1].mean() - vmapped[:, -1].mean()):.3f}"
    )
    path = ROOT / "runs" / "fused_seeds.png"
    draw(mapped, path)
    print(f"curves in {path}")
    if not all(same):
        raise SystemExit("a mapped seed differs from its single run")


if __name__ == "__main__":
    main(replace(Config(), steps=int(sys.argv[1])) if len(sys.argv) > 1 else Config())
