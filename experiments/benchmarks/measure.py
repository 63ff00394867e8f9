"""Timing a process's steps and describing the result. Standard library only: the peers, who live
in environments of their own, measure themselves with this file too.
"""

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# CPU seconds that other processes may use during a clean step: a share of the step, and the
# resolution of the kernel's counters.
SHARE, RESOLUTION = 0.1, 0.03
FEWEST_CLEAN = 3
GIB = 2**30
IMPORTED = time.perf_counter()


@dataclass(frozen=True)
class Mark:
    """A moment: seconds of the clock, and CPU seconds used so far by all and by this process."""

    at: float
    busy: float
    own: float


def now() -> Mark:
    """The present moment. Where the kernel does not say what others use, all counts as ours."""
    own = time.process_time()
    stat = Path("/proc/stat")
    busy = own
    if stat.exists():
        user, nice, system, _, _, irq, soft = map(int, stat.read_text().split()[1:8])
        busy = (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    return Mark(time.perf_counter(), busy, own)


@dataclass
class Clock:
    """Marks between steps: step i lies between mark i and mark i+1."""

    marks: list[Mark] = field(default_factory=list)

    def mark(self) -> None:
        """One step has ended and the next begins."""
        self.marks.append(now())

    def steps(self) -> list[tuple[float, bool]]:
        """(seconds, whether other processes kept quiet) of every step."""
        out = []
        for a, b in zip(self.marks, self.marks[1:], strict=False):
            seconds = b.at - a.at
            others = (b.busy - a.busy) - (b.own - a.own)
            out.append((seconds, others <= SHARE * seconds + RESOLUTION))
        return out


def chosen(steps: Sequence[tuple[float, bool]]) -> list[float]:
    """The seconds of the clean steps, or of all when too few were clean."""
    clean = [seconds for seconds, quiet in steps if quiet]
    return clean if len(clean) >= FEWEST_CLEAN else [seconds for seconds, _ in steps]


def age() -> float:
    """Seconds since this process started, or where the kernel does not say, since this import."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.perf_counter() - IMPORTED
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def high_water(process: int | None = None) -> float | None:
    """The most memory that a program (by default this one) has had resident, in GiB; None where the
    kernel does not say.
    """
    try:
        status = Path(f"/proc/{process or 'self'}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / GIB
    return None


def peak_memory() -> float:
    """The most memory this program has had resident, in GiB.

    The kernel's high-water mark of this program. `ru_maxrss`, used where there is none, starts
    from the size of the process that started us.
    """
    if (found := high_water()) is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def threads() -> int:
    """The CPUs this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of Python and of the packages that are installed."""
    out = {"python": platform.python_version()}
    for package in packages:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out


def describe(
    clock: Clock,
    *,
    warmups: int,
    tokens: int,
    parts: Mapping[str, Sequence[float]],
    load_seconds: float,
    packages: Sequence[str],
    check: Any,
) -> dict[str, Any]:
    """What one process found out, as the fields of its JSON line.

    `process_seconds` is the time from the start of the process to the end of the first step,
    `seconds` the median of the steps after the warm-up, `tokens` what one step makes or trains
    on. `parts` are the seconds that each step spent in a part of it, warm-up included; their
    medians are given. `compile_seconds` is what the warm-up took beyond so many median steps.
    `check` is a result that other libraries doing the same work must have too.
    """
    steps = clock.steps()
    if len(steps) <= warmups:
        raise ValueError(f"expected more than {warmups} steps, the warm-up, got {len(steps)}")
    warm, timed = steps[:warmups], steps[warmups:]
    times = chosen(timed)
    median = statistics.median(times)
    return {
        "seconds": round(median, 5),
        "seconds_low": round(min(times), 5),
        "seconds_high": round(max(times), 5),
        "steps": len(times),
        "clean_steps": sum(quiet for _, quiet in timed),
        "tokens": tokens,
        "tokens_per_second": round(tokens / median, 2),
        "parts": {k: round(statistics.median(v[warmups:]), 5) for k, v in parts.items()},
        "peak_memory_gib": round(peak_memory(), 3),
        "load_seconds": round(load_seconds, 2),
        "process_seconds": round(clock.marks[1].at - time.perf_counter() + age(), 2),
        "first_step_seconds": round(steps[0][0], 3),
        "compile_seconds": round(max(0.0, sum(s for s, _ in warm) - median * len(warm)), 3),
        "check": check,
        "threads": threads(),
        "versions": versions(packages),
    }
