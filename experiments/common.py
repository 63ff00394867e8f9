"""What experiments share: the compile cache, memory after compiling, intervals and curves over
seeds, tables in pages, and where runs are kept.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

ROOT = Path(__file__).resolve().parents[1]

# jaxlib 0.10's YNNPACK fusions can crash in programs that are vmapped over very small models.
NO_FUSIONS = "--xla_cpu_experimental_ynn_fusion_type="


def restart_without_fusions() -> None:
    """Start the program anew with NO_FUSIONS among XLA's flags, which are read at the start, where
    this JAX needs it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ < (0, 11) and NO_FUSIONS not in flags:
        environment = os.environ | {"XLA_FLAGS": f"{flags} {NO_FUSIONS}"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def use_compile_cache() -> None:
    """Keep compiled programs in the checkout's .cache/jax, so that only a first run compiles."""
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def return_compiler_memory() -> None:
    """Hand back what compiling freed: glibc keeps it otherwise, hundreds of MiB that a step then
    cannot use. Nothing happens where there is no glibc.
    """
    try:
        trim = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and duration_secs > 0.5:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)


def fresh_directory(parent: Path, name: str, finished: str) -> Path:
    """parent/name, or name-2, name-3, …: the first that holds no finished run.

    A run is finished when it has left the file `finished`; one that was stopped is gone on with.
    """
    number, directory = 1, parent / name
    while (directory / finished).exists():
        number += 1
        directory = parent / f"{name}-{number}"
    return directory


def half_width(x: Float[np.ndarray, "n *s"]) -> Float[np.ndarray, "*s"]:
    """Half of the 95% interval of the mean over n seeds, by Student's t."""
    from scipy.stats import t

    return t.ppf(0.975, len(x) - 1) * x.std(0, ddof=1) / np.sqrt(len(x))


def plot_seeds(
    panels: Mapping[str, Float[np.ndarray, "n s"]],
    path: Path,
    *,
    title: str,
    over: str,
    best: float | None = None,
) -> None:
    """A panel for each quantity: every seed's curve, their mean, and its 95% interval; a line at
    the best possible value.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (label, curves) in zip(axes, panels.items(), strict=True):
        mean, half = curves.mean(0), half_width(curves)
        x = np.arange(1, curves.shape[1] + 1)
        axis.plot(x, curves.T, color="#2f6db3", alpha=0.25, linewidth=0.8)
        axis.fill_between(x, mean - half, mean + half, color="#d9722e", alpha=0.3, linewidth=0)
        axis.plot(x, mean, color="#d9722e", linewidth=1.8)
        if best is not None:
            axis.axhline(best, color="black", linewidth=0.8, linestyle="--")
        axis.set(xlabel=over, ylabel=label, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def keep_table(page: Path, table: str) -> None:
    """Put a table, and what comes with it, in the place of the one that ends a page."""
    header = table.partition("\n")[0]
    before = page.read_text(encoding="utf-8").partition(header)[0]
    page.write_text(before + table + "\n", encoding="utf-8")


def table_of_seeds(columns: Mapping[str, Float[np.ndarray, " n"]]) -> str:
    """A row for each seed, and the mean with its 95% interval, as Markdown."""
    rows = [f"| seed | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for seed, values in enumerate(zip(*columns.values(), strict=True)):
        rows.append(f"| {seed} | " + " | ".join(f"{x:.3f}" for x in values) + " |")
    spread = [f"{x.mean():.3f} ± {half_width(x):.3f}" for x in columns.values()]
    return "\n".join([*rows, f"| mean, 95% | {' | '.join(spread)} |"])
