"""A picture of a run: its curves, and its distributions over time, from its metrics file."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ..mean import LEVELS
from .metrics import QUANTILES
from .writers import read_jsonl

Curves = dict[str, tuple[Float[np.ndarray, " s"], Float[np.ndarray, "s *q"]]]

COLUMNS = 3
INK, FAINT = "#1f2430", "#d8dce3"
COLORS = ("#2f6db3", "#d9722e", "#3a9a6b", "#a04d9e", "#8a7a2f", "#5b6b7f", "#c0445a", "#2aa0b0")


@dataclass(frozen=True)
class Panel:
    """One plot: curves by metric name with their labels, or one distribution."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]


# In the order of the picture. A panel appears where any of its metrics does; one in QUIET only if
# it is ever other than 0.
PANELS = (
    Panel("Reward", "reward", (("reward", ""),)),
    Panel("Rewards, distribution", "reward", ((f"reward{QUANTILES}", ""),)),
    Panel("Loss", "loss", (("loss", ""),)),
    Panel(
        "Completion length, mean",
        "tokens",
        (("completions/mean_length", "all"), ("completions/mean_terminated_length", "not cut off")),
    ),
    Panel("Lengths, distribution", "tokens", ((f"completions/length{QUANTILES}", ""),)),
    Panel("Completions cut off", "share of completions", (("completions/clipped_ratio", ""),)),
    Panel("Reward spread in a group", "standard deviation", (("reward_std", ""),)),
    Panel("Groups that teach nothing", "share of groups", (("frac_reward_zero_std", ""),)),
    Panel("Completions unscored", "share of completions", (("frac_unscored", ""),)),
    Panel("KL divergence", "nats per token", (("kl", ""),)),
    Panel("Entropy", "nats per token", (("entropy", ""),)),
    Panel("Token accuracy", "share of tokens", (("mean_token_accuracy", ""),)),
    Panel("Gradient norm", "L2 norm", (("grad_norm", ""),)),
    Panel(
        "Clipped tokens",
        "share of tokens",
        (
            ("clip_ratio/region_mean", "any"),
            ("clip_ratio/low_mean", "low"),
            ("clip_ratio/high_mean", "high"),
        ),
    ),
    Panel(
        "Preference rewards",
        "nats",
        (
            ("rewards/chosen", "chosen"),
            ("rewards/rejected", "rejected"),
            ("rewards/margins", "margin"),
        ),
    ),
    Panel("Speed", "tokens per second", (("tokens_per_second", ""),)),
    Panel("Step time", "seconds", (("step_time", ""),)),
)
# Not drawn in a panel of their own: bookkeeping, and what the distribution of lengths shows.
LEFT_OUT = {"step", "time", "num_tokens", "completions/min_length", "completions/max_length"}
TIMES = {"step_time", "tokens_per_second"}
QUIET = {"Completions unscored", "Clipped tokens"}


def picture(jsonl: str | Path, png: str | Path, *, title: str = "") -> None:
    """Draw the run whose metrics are in `jsonl` into `png`.

    Known metrics come first, with their units; then any others, each under its name, unless it was
    0 throughout. Distributions ("…/quantiles") are drawn as their median, the bands of 50 % and
    80 %, and their ends. Many steps are smoothed over about a thirtieth of the run, the raw curve
    staying visible behind.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "expected the package matplotlib, found none; pip install 'purepost[demo]'"
        ) from error

    curves = _curves(read_jsonl(jsonl))
    panels = _panels(curves)
    if not panels:
        raise ValueError(f"expected metrics to draw in {jsonl}, got none; has the run made a step?")
    rows, columns = ceil(len(panels) / COLUMNS), min(COLUMNS, len(panels))
    with mpl.rc_context(_style()):
        figure = Figure(figsize=(4.0 * columns, 2.7 * rows + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, panel in zip(axes, panels, strict=False):
            _draw(axis, panel, curves)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150)


def _curves(records: list[dict[str, Any]]) -> Curves:
    """Every metric's steps and values; missing and null values are left out."""
    # The first step compiles; its time would flatten the others'.
    first = records[0]["step"] if len(records) > 2 else None
    names = dict.fromkeys(name for record in records for name in record)
    curves: Curves = {}
    for name in names.keys() - LEFT_OUT:
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        points = [(s, y) for s, y in points if not (isinstance(y, list) and None in y)]
        if name in TIMES:
            points = [(s, y) for s, y in points if s != first]
        if points:
            steps, values = zip(*points, strict=True)
            curves[name] = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    return {name: curves[name] for name in names if name in curves}


def _panels(curves: Curves) -> list[Panel]:
    """The panels that have something to show."""
    panels = []
    for panel in PANELS:
        present = tuple((name, label) for name, label in panel.curves if name in curves)
        told = any(np.any(curves[name][1]) for name, _ in present)
        if present and (told or panel.title not in QUIET):
            panels.append(Panel(panel.title, panel.unit, present))
    parts = [n for n in curves if n.startswith("rewards/") and n.endswith("/mean")]
    if len(parts) > 1:
        labels = tuple((n, n.removeprefix("rewards/").removesuffix("/mean")) for n in parts)
        panels.append(Panel("Reward functions, mean", "reward", labels))
    drawn = {name for panel in panels for name, _ in panel.curves} | set(parts)
    for name, (_, values) in curves.items():
        fits = values.ndim == 1 or (name.endswith(QUANTILES) and values.shape[1] == len(LEVELS))
        if name not in drawn and fits and np.any(values):
            panels.append(Panel(name.removesuffix(QUANTILES), "", ((name, ""),)))
    return panels


def _draw(axis: Any, panel: Panel, curves: Curves) -> None:
    """One panel."""
    for color, (name, label) in zip(COLORS * 4, panel.curves, strict=False):
        steps, values = curves[name]
        if values.ndim == 2:
            _fan(axis, steps, values, color)
            continue
        smooth = _smooth(values)
        if len(values) >= 30:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        marker = "o" if len(values) < 30 else ""
        shown = label if len(panel.curves) > 1 else None
        axis.plot(steps, smooth, color=color, label=shown, marker=marker, markersize=3)
    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.set_ylabel(panel.unit)
    axis.margins(x=0.02)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)


def _fan(
    axis: Any, steps: Float[np.ndarray, " s"], values: Float[np.ndarray, "s q"], color: str
) -> None:
    """A distribution over time: LEVELS as median, bands and ends."""
    least, q10, q25, middle, q75, q90, most = values.T
    axis.fill_between(steps, q10, q90, color=color, alpha=0.18, linewidth=0, label="80 %")
    axis.fill_between(steps, q25, q75, color=color, alpha=0.35, linewidth=0, label="50 %")
    axis.plot(steps, middle, color=color, label="median")
    for end, label in ((least, "min, max"), (most, None)):
        axis.plot(steps, end, color=color, alpha=0.6, linewidth=0.7, linestyle=":", label=label)


def _smooth(x: Float[np.ndarray, " s"]) -> Float[np.ndarray, " s"]:
    """A centred triangular mean over about a thirtieth of the curve; short curves as they are."""
    half = len(x) // 60
    if len(x) < 30 or half < 1:
        return x
    window = np.bartlett(2 * half + 3)
    weight = np.convolve(np.ones_like(x), window, "same")
    return np.convolve(x, window, "same") / weight


def _style() -> Any:
    return {
        "font.size": 9,
        "font.family": "DejaVu Sans",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "lines.linewidth": 1.6,
        "figure.facecolor": "white",
    }
