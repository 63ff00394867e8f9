"""Code that a model wrote, run where it can do no harm: never in this process, nor in reach of its
files, its network, its environment or its memory.

The walls are Linux's (jail.py): namespaces without a network, a small file system in memory, no
capabilities, resource limits. Where the kernel refuses one of them nothing runs, and OSError says
why.
"""

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

JAIL = Path(__file__).with_name("jail.py")


@dataclass(frozen=True)
class Limits:
    """What code may use. Memory, time of the processor and open files are of each process, the
    rest of all together.
    """

    seconds: float | int = 10.0  # of the clock
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 16 * 2**20
    files: int = 256
    open_files: int = 64
    processes: int = 16
    output_bytes: int = 64 * 2**10

    def __post_init__(self) -> None:
        wrong = {name: x for name, x in dataclasses.asdict(self).items() if not x > 0}
        if wrong:
            raise ValueError(f"expected limits > 0, got {wrong}")


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    stdout: str
    stderr: str
    code: int  # the exit code; 128 + the number of the signal that ended it
    cut: str | None = None  # "time" or "output": the limit that ended it

    @property
    def text(self) -> str:
        """What a model is told."""
        parts = [self.stdout, self.stderr]
        if self.cut is not None:
            parts.append(f"stopped: the limit on {self.cut} was reached")
        elif self.code > 128:
            parts.append(f"stopped by signal {self.code - 128}: a limit was reached, perhaps")
        elif self.code:
            parts.append(f"exit code {self.code}")
        return "\n".join(part.rstrip("\n") for part in parts if part)


def run_python(code: str, limits: Limits | None = None) -> Finished:
    """Run a program in Python's standard library, without input; what it prints is its result.

    Errors: OSError where a wall cannot be built: not on Linux, or no user namespaces for this user.
    """
    limits = Limits() if limits is None else limits
    if sys.platform != "linux":
        raise OSError(
            f"expected Linux, of whose namespaces the sandbox is made, got {sys.platform}"
        )
    ready, told = os.pipe()
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", str(JAIL)]
    with os.fdopen(ready, "rb") as stands, tempfile.TemporaryFile() as source:
        source.write(code.encode("utf-8", "replace"))
        source.seek(0)
        try:
            process = subprocess.Popen(
                [*command, json.dumps(dataclasses.asdict(limits)), str(told)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=(told,),
                start_new_session=True,
            )
        finally:
            os.close(told)
        with process:
            try:
                texts, cut = _read([process.stdout, process.stderr], limits)
            finally:
                _kill(process)
            status = process.wait()
        if not stands.read(1):
            raise OSError(
                "expected a kernel in which this user may make namespaces and mount in them, got "
                f"{texts[1].strip() or cut or status}; run where that is allowed, or leave code out"
            )
    return Finished(texts[0], texts[1], status if status >= 0 else 128 - status, cut)


def _read(pipes: list[IO[bytes] | None], limits: Limits) -> tuple[list[str], str | None]:
    """What comes out of the pipes until they close, and the limit that was reached before."""
    read = {pipe.fileno(): bytearray() for pipe in pipes if pipe is not None}
    deadline = time.monotonic() + limits.seconds
    cut = None
    with selectors.DefaultSelector() as selector:
        for fd in read:
            selector.register(fd, selectors.EVENT_READ)
        while cut is None and selector.get_map():
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                chunk = os.read(key.fd, 65536)
                read[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
            if sum(map(len, read.values())) > limits.output_bytes:
                cut = "output"
            elif time.monotonic() >= deadline:
                cut = "time"
    return [bytes(x[: limits.output_bytes]).decode("utf-8", "replace") for x in read.values()], cut


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the jail, with all that is in it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
