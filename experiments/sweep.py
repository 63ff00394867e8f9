"""A sweep over learning rates and clips as one XLA program.

    python experiments/sweep.py        (or python -m experiments.sweep)

The run is fused_seeds' (GRPO from scratch, to name the largest of four digits) with a smaller model
and four optimizer steps a rollout, so that the clip counts. Hyperparameters are arguments of the
factory and may be traced: a sweep is `lax.map` or `vmap` over calls of it. `lax.map` gives each
point's single run to the bit, `vmap` the same up to rounding, at the speed that is printed. The
table and the figure are in runs/sweep.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

if __package__ is None or __package__ == "":  # run as a file: the root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import fused_seeds
from experiments.common import ROOT, restart_without_fusions, use_compile_cache
from experiments.fused_seeds import timed, whole_run
from purepost.models import Config as Model


@dataclass(frozen=True)
class Config:
    """The sweep: every rate with every clip, over some seeds."""

    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    clips: tuple[float, ...] = (0.05, 0.2, 0.8)
    seeds: int = 2
    last: int = 5  # steps that a result is the mean of
    run: fused_seeds.Config = fused_seeds.Config(
        steps=50,
        prompts=8,
        epochs=4,
        model=Model(
            vocab_size=12,
            hidden_size=32,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            max_positions=32,
        ),
    )


def points(config: Config) -> Float[Array, "n 3"]:
    """(rate, clip, seed) of every run, the seed changing fastest."""
    axes = (config.rates, config.clips, range(config.seeds))
    grid = np.meshgrid(*(np.asarray(axis, np.float32) for axis in axes), indexing="ij")
    return jnp.asarray(np.stack(grid, -1).reshape(-1, 3))


def table(results: Float[np.ndarray, "r c n"], config: Config) -> str:
    """The mean over seeds, and the lowest and highest seed, of every rate and clip, as Markdown."""
    rows = [
        "| learning rate | " + " | ".join(f"clip {clip:g}" for clip in config.clips) + " |",
        "|---" * (1 + len(config.clips)) + "|",
    ]
    for rate, row in zip(config.rates, results, strict=True):
        cells = [f"{x.mean():.3f} ({x.min():.3f}, {x.max():.3f})" for x in row]
        rows.append(f"| {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def draw(curves: Float[np.ndarray, "r c n s"], config: Config, path: Path) -> None:
    """A panel for each rate, a curve for each clip: the mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(config.rates), 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(config.rates), sharey=True, squeeze=False)[0]
    x = np.arange(1, config.run.steps + 1)
    for axis, rate, of_rate in zip(axes, config.rates, curves, strict=True):
        for clip, y in zip(config.clips, of_rate.mean(1), strict=True):
            axis.plot(x, y, linewidth=1.4, label=f"clip {clip:g}")
        axis.set(xlabel="step", ylim=(0, 1.02))
        axis.set_title(f"learning rate {rate:g}", loc="left", fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("reward: share of tokens that are right")
    axes[-1].legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(config: Config) -> None:
    """Run every point alone, then all by map and by vmap, and compare."""
    use_compile_cache()

    def run(point: Float[Array, " 3"]) -> Float[Array, " s"]:
        rate, clip, seed = point
        return whole_run(config.run, seed.astype(jnp.int32), rate, clip)

    grid = points(config)
    single = jax.jit(run).lower(grid[0]).compile()
    start = time.perf_counter()
    singles = np.stack([np.asarray(single(point)) for point in grid])
    one_by_one = time.perf_counter() - start
    mapped, _, by_map = timed(lambda x: jax.lax.map(run, x), grid)
    vmapped, _, by_vmap = timed(jax.vmap(run), grid)
    differ = np.flatnonzero((singles != mapped).any(1)).tolist()
    shape = (len(config.rates), len(config.clips), config.seeds)
    text = table(mapped[:, -config.last :].mean(1).reshape(shape), config)
    directory = ROOT / "runs" / "sweep"
    draw(mapped.reshape(*shape, -1), config, directory / "sweep.png")
    (directory / "sweep.md").write_text(text, encoding="utf-8")
    first = np.abs(mapped[:, 0] - vmapped[:, 0]).max()
    print(f"reward at the end, mean over {config.seeds} seeds (lowest, highest):\n\n{text}")
    print(f"{len(grid)} runs of {config.run.steps} steps one by one: {one_by_one:.2f} s")
    print(f"lax.map over them: {by_map:.2f} s; those that differ from their run alone: {differ}")
    print(
        f"vmap over them: {by_vmap:.2f} s, {by_map / by_vmap:.2f}× the speed of map; "
        f"first steps' rewards differ by {first:.1e}"
    )
    print(f"table and curves in {directory}")
    if differ:
        raise SystemExit("a mapped run differs from its single run")


if __name__ == "__main__":
    restart_without_fusions()
    main(Config())
