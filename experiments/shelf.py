"""Every algorithm of the shelf on a task whose optimum is known, over several seeds at once.

    python experiments/shelf.py [name ...]        (or python -m experiments.shelf)

A probe (experiments/probes) is a factory, a tiny model and a task. Its whole run, sampling and
optimizer steps included, is one XLA program, vmapped over seeds; what the probe measures is
measured before every step. docs/shelf.md and docs/shelf.png show them all. With names, only the
probes of these factories run; the others are shown as they were left in runs/shelf.

A factory without a probe is an error.
"""

import inspect
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

if __package__ is None or __package__ == "":  # run as a file: the root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import ROOT, half_width, restart_without_fusions, use_compile_cache
from experiments.probes import KNOWN, PROBES, Probe, tiny
from purepost import algorithms, fuse

Curves = dict[str, np.ndarray]
NEIGHBOURS, DISTANT = ((0, 1), (1, 2), (2, 3)), ((0, 2), (1, 3), (0, 3))

TEXT = """# The shelf, tried

Every algorithm that `purepost.algorithms` exports, on a task whose optimum is known: {seeds} seeds
of {steps} steps by Adam at {rate}, on a decoder of two layers and twelve tokens. Made by

    python experiments/shelf.py

Means over seeds with 95% intervals (Student's t). *Before* is the first model, *after* the mean of
the last {last} steps. A task is solved when it ends within {near} of its optimum.

![curves](shelf.png)

{solved}
{lacking}
Rewards are of a step's sampled completions (the share of their tokens that is wanted), so
their *after* has the noise of sampling in it; `pass_at_k` is paid for the best of four and measured
by the best quarter. Where a loss is measured, it may come as near 0 as one likes.

## A known reward, recovered

Two prompts with four completions each, whose rewards lie ln 3 ≈ 1.10 apart: of two neighbours the
better one is preferred three times in four, drawn afresh every step. Only neighbours are compared.
The margin is by how much the trained model rewards the better of two neighbours more (log π/π_ref,
log π where there is no reference, the score of a reward model); for DPO at β = 1 and for reward
models its optimum is ln 3. The last columns are the shares of pairs that it puts in the right
order.

{known}
"""


@dataclass(frozen=True)
class Config:
    """The runs. `last`: over how many steps the end is averaged."""

    seeds: int = 5
    steps: int = 60
    learning_rate: float = 0.01
    last: int = 5
    near: float = 0.1  # how near the optimum is solved


def missing() -> list[str]:
    """Factories that purepost exports and no probe tries."""
    exported = {n for n, f in inspect.getmembers(algorithms, inspect.isfunction) if n[0] != "_"}
    return sorted(exported - {probe.factory for probe in PROBES.values()})


def stacked(trees: Iterable[PyTree]) -> PyTree:
    """The arrays of equal trees in one tree; what is no array is the first one's."""
    trees = list(trees)
    arrays = [eqx.filter(tree, eqx.is_array) for tree in trees]
    many = jax.tree.map(lambda *x: jnp.stack(x), *arrays)
    return eqx.combine(many, eqx.filter(trees[0], eqx.is_array, inverse=True))


def curves(probe: Probe, config: Config) -> Float[np.ndarray, "n s *m"]:
    """What the probe measures before every step of every seed's run."""
    algorithm = probe.algorithm(optax.adam(config.learning_rate))
    step, lora, seeds = fuse(algorithm), probe.lora[0], range(config.seeds)
    states = stacked(
        algorithm.init(jr.key(s), probe.models(tiny(lora=lora, seed=s))) for s in seeds
    )
    data = stacked(stacked(map(probe.data(s), range(config.steps))) for s in seeds)
    start, fixed = eqx.partition(states, eqx.is_array)

    def run(seed: Int[Array, ""], start: PyTree, data: PyTree) -> Float[Array, "s *m"]:
        def body(carry: PyTree, x: Any) -> tuple[PyTree, Float[Array, "*m"]]:
            i, batch = x
            state = eqx.combine(carry, fixed)
            new, metrics = step(jr.fold_in(jr.key(seed), i), state, batch)
            measured = probe.measure(state.models, metrics, batch)
            return eqx.filter(new, eqx.is_array), measured

        steps = jnp.arange(config.steps, dtype=jnp.int32)
        return jax.lax.scan(body, start, (steps, data))[1]

    return np.asarray(
        jax.jit(jax.vmap(run))(jnp.arange(config.seeds, dtype=jnp.int32), start, data)
    )


def spread(x: Float[np.ndarray, " n"]) -> str:
    """The mean over seeds, and half of its 95% interval."""
    return f"{x.mean():.3f} ± {half_width(x):.3f}"


def row(
    name: str, probe: Probe, found: Float[np.ndarray, "n s"], config: Config
) -> tuple[str, ...]:
    """A row of the first table."""
    end = found[:, -config.last :].mean(1)
    near = np.abs(end - probe.optimum) <= config.near
    optimum, solved = f"{probe.optimum:.3g}", f"{near.sum()} of {len(near)}"
    return (f"`{name}`", probe.quantity, optimum, spread(found[:, 0]), spread(end), solved)


def in_order(rewards: Float[np.ndarray, "n s p k"], pairs: tuple) -> Float[np.ndarray, "n s"]:
    """The share of pairs of completions whose better one has the higher reward; half for equal."""
    better, worse = (rewards[..., [pair[i] for pair in pairs]] for i in (0, 1))
    return ((np.sign(better - worse) + 1) / 2).mean((-2, -1))


def margin(rewards: Float[np.ndarray, "n s p k"]) -> Float[np.ndarray, "n s"]:
    """By how much the better of two neighbours is rewarded more, nats."""
    return (rewards[..., :-1] - rewards[..., 1:]).mean((-2, -1))


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def known_row(name: str, rewards: Float[np.ndarray, "n s p k"], config: Config) -> tuple[str, ...]:
    """A row of the second table."""
    all_pairs = (margin(rewards), in_order(rewards, NEIGHBOURS), in_order(rewards, DISTANT))
    ends = [spread(x[:, -config.last :].mean(1)) for x in all_pairs]
    return (f"`{name}`", spread(margin(rewards)[:, 0]), *ends)


def document(found: Curves, known: Curves, config: Config) -> str:
    """docs/shelf.md."""
    lacking = [f"`{name}`" for name in PROBES if name not in found]
    header = ("algorithm", "measured", "optimum", "before", "after", f"within {config.near}")
    more = ("algorithm", "margin before", "margin after", "compared pairs", "pairs never compared")
    return TEXT.format(
        seeds=config.seeds,
        steps=config.steps,
        last=config.last,
        rate=config.learning_rate,
        near=config.near,
        lacking=f"\nNot run yet: {', '.join(lacking)}.\n" if lacking else "",
        solved=table(header, [row(n, PROBES[n], x, config) for n, x in found.items()]),
        known=table(more, [known_row(n, x, config) for n, x in known.items()]),
    )


def draw(panels: dict[str, tuple[Float[np.ndarray, "n s"], float]], path: Path) -> None:
    """A small panel for each: the mean over seeds, its 95% interval, the optimum."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 8
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(13, 1.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (name, (found, optimum)) in zip(axes, panels.items(), strict=False):
        axis.set_axis_on()
        mean, half, x = found.mean(0), half_width(found), np.arange(found.shape[1])
        axis.axhline(optimum, color="0.6", linewidth=0.8, linestyle="--")
        axis.fill_between(x, mean - half, mean + half, color="#d9722e", alpha=0.35, linewidth=0)
        axis.plot(x, mean, color="#2f6db3", linewidth=1.0)
        axis.set_title(name, fontsize=7)
        axis.tick_params(labelsize=5, length=2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)


def of(probes: dict[str, Probe], suffix: str, names: list[str], config: Config) -> Curves:
    """The curves of the probes: those of the factories named (of all, if none is) found now, the
    others as they were kept, and not there if they never ran.
    """
    found = {}
    for name, probe in probes.items():
        path = ROOT / "runs" / "shelf" / f"{name.replace(':', '')}{suffix}.npy"
        if not names or probe.factory in names:
            start = time.perf_counter()
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, curves(probe, config))
            print(f"{name}{suffix}: {time.perf_counter() - start:.0f} s", flush=True)
            jax.clear_caches()  # one process can hold only so many programs
        if path.exists():
            found[name] = np.load(path)
    return found


def main(config: Config, names: list[str]) -> None:
    """Run the probes, and write the page."""
    if lacking := missing():
        raise SystemExit(
            f"expected a probe of every factory, got none of {', '.join(lacking)}; "
            "add one to experiments/probes"
        )
    if unknown := set(names) - {probe.factory for probe in PROBES.values()}:
        raise SystemExit(f"expected names of factories, got {', '.join(sorted(unknown))}")
    use_compile_cache()
    # The programs are tiny: almost all of the time would go into compiling them well.
    jax.config.update("jax_disable_most_optimizations", True)
    found = of(PROBES, "", names, config)
    known = of(KNOWN, ", known reward", names, config)
    page = ROOT / "docs" / "shelf.md"
    page.write_text(document(found, known, config), encoding="utf-8")
    panels = {name: (x, PROBES[name].optimum) for name, x in found.items()}
    for name, x in known.items():
        panels[f"{name}: pairs in order"] = in_order(x, NEIGHBOURS + DISTANT), 1.0
    draw(panels, page.with_suffix(".png"))
    print(f"wrote {page} and {page.with_suffix('.png')}")


if __name__ == "__main__":
    restart_without_fusions()
    main(Config(), sys.argv[1:])
