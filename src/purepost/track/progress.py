"""Progress of a run on the screen: a live line in a terminal, plain lines elsewhere."""

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, final

from .metrics import Record

if TYPE_CHECKING:
    from rich.console import Console

# What is shown of a record, where it is there: its name, and a label.
SHOWN = {
    "reward": "reward",
    "loss": "loss",
    "kl": "kl",
    "completions/mean_length": "length",
    "tokens_per_second": "tokens/s",
}


@final
class Progress:
    """Steps, reward, loss, tokens/s and time left, by rich.

    In a terminal one line is kept up to date; elsewhere every `every`-th step and the last print a
    line of their own. The time left is by the median of the latest steps, compilation left out.
    """

    def __init__(
        self, steps: int, *, step: int = 0, every: int = 1, console: "Console | None" = None
    ) -> None:
        if steps < 1 or every < 1:
            raise ValueError(f"expected steps ≥ 1 and every ≥ 1, got {steps} and {every}")
        from rich import console as rich_console
        from rich import progress as rich_progress

        self.steps, self.every = steps, every
        self.console = rich_console.Console() if console is None else console
        self._times: deque[float] = deque(maxlen=20)
        self._first = True
        self._live: Any = None
        if self.console.is_terminal:
            self._live = rich_progress.Progress(
                rich_progress.MofNCompleteColumn(),
                rich_progress.BarColumn(bar_width=24),
                rich_progress.TextColumn("{task.description}", markup=False),
                console=self.console,
            )
            self._live.start()
            self._task = self._live.add_task("compiling", total=steps, completed=step)

    def write(self, step: int, record: Record) -> None:
        """Show a step."""
        elapsed = record.get("step_time")
        if isinstance(elapsed, float):
            if self._first:
                self._first = False
            else:
                self._times.append(elapsed)
        parts = [
            f"{label} {_number(value)}"
            for name, label in SHOWN.items()
            if isinstance(value := record.get(name), float)
        ]
        if self._times and step < self.steps:
            parts.append(f"{_duration(median(self._times) * (self.steps - step))} left")
        if self._live is not None:
            self._live.update(self._task, completed=step, description="  ".join(parts))
        elif step % self.every == 0 or step >= self.steps:
            text = "  ".join([f"step {step}/{self.steps}", *parts])
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._live is not None:
            self._live.stop()


def _number(x: float) -> str:
    """Three or four digits that matter."""
    return f"{x:.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"


def _duration(seconds: float) -> str:
    """As 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{whole}s"
