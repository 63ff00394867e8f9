"""What experiments share: the compile cache, memory after compiling, intervals over seeds, and
where runs are kept.
"""

import ctypes
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

ROOT = Path(__file__).resolve().parents[1]


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
