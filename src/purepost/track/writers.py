"""Where metrics go: JSONL, TensorBoard, and several places at once.

Metrics bear TRL's names, so that existing dashboards read them. One departs: `num_tokens` is what a
step processed and not a running total, for nothing that resuming would lose is kept here.
"""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, final, runtime_checkable

import jax

from ..mean import LEVELS, Metrics
from .metrics import Record, finite, to_floats


@runtime_checkable
class Writer(Protocol):
    """A place that records go to."""

    def write(self, step: int, record: Record) -> None:
        """Take the record of the step that was done last; the first step's number is 1."""
        ...

    def close(self) -> None:
        """Finish; nothing is written afterwards."""
        ...


@final
class Tracker:
    """Metrics as floats, once, to every writer; a context manager that closes them.

    Adds `step_time` (seconds since the record before, so the first holds the compilation) and,
    where the metrics count `num_tokens`, `tokens_per_second`. Of several processes only the first
    writes.
    """

    def __init__(self, *writers: Writer) -> None:
        self.writers = writers
        self._last = time.monotonic()

    def write(self, step: int, metrics: Metrics, **more: float | int) -> Record:
        """Write a step's metrics and further numbers; returns what was written."""
        record = to_floats(metrics) | {name: float(value) for name, value in more.items()}
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        record["step_time"] = elapsed
        tokens = record.get("num_tokens")
        if isinstance(tokens, float) and elapsed > 0:
            record["tokens_per_second"] = tokens / elapsed
        if jax.process_index() == 0:
            for writer in self.writers:
                writer.write(step, record)
        return record

    def close(self) -> None:
        """Close every writer."""
        for writer in self.writers:
            writer.close()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@final
class Jsonl:
    """One JSON object a line: `step`, `time` (seconds since 1970), and the metrics by name.

    Lines are written whole as they come. A run that resumes after `step` drops the lines of later
    steps, which it is about to write again, and a last line that a kill cut short. NaN and inf are
    null.
    """

    def __init__(self, path: str | Path, *, step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [json.dumps(line) for line in read_jsonl(self.path) if line["step"] <= step]
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, record: Record) -> None:
        """Append one line."""
        line = {"step": step, "time": time.time()} | finite(record)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a kill cut short is left out.

    Raises: FileNotFoundError; ValueError for a line that is no record of a step.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"expected metrics at {path}, found no file; check the path")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
            raise ValueError(
                f"expected a JSON object with a step in line {number} of {path}, got "
                f"{line.strip()[:80]!r}; repair or move the file"
            )
        records.append(record)
    return records


@final
class TensorBoard:
    """Scalars for TensorBoard, by tensorboardX; quantiles as one scalar a level.

    A run that resumes after `step` tells TensorBoard to forget later points.
    """

    def __init__(self, directory: str | Path, *, step: int = 0) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "expected the package tensorboardX, found none; "
                "pip install 'purepost[tensorboard]', or write metrics to Jsonl alone"
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def write(self, step: int, record: Record) -> None:
        """Add one point to every curve."""
        for name, value in record.items():
            if isinstance(value, list):
                labels = (
                    [f"q{100 * level:g}" for level in LEVELS]
                    if len(value) == len(LEVELS)
                    else [str(i) for i in range(len(value))]
                )
                for label, x in zip(labels, value, strict=True):
                    self._writer.add_scalar(f"{name}/{label}", x, step)
            else:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
