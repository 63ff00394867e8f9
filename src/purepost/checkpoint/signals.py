"""An orderly stop: a signal raises a flag, and the loop ends after the step it is in."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Stop:
    """Whether a stop was asked for."""

    requested: bool = False


@contextmanager
def stop_on_sigterm(signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> Iterator[Stop]:
    """While inside, the first signal only sets `requested`; a second one does what it always did.

    Batch systems send SIGTERM some time before they kill; some can be told to send another. Works
    in the main thread only, as Python's handlers do.
    """
    stop = Stop()
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        restore()

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)

    for one in signals:
        before[one] = signal.signal(one, handle)
    try:
        yield stop
    finally:
        restore()
