"""The programs that JAX compiles in a process. Needs JAX alone: Tunix counts its own with it."""

import jax

PROGRAM = "/jax/core/compile/backend_compile_duration"
CACHED = "/jax/compilation_cache/cache_hits"


class Programs:
    """Counts the programs that this process makes from now on."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cached = 0
        jax.monitoring.register_event_duration_secs_listener(self._made)
        jax.monitoring.register_event_listener(self._found)

    def _made(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == PROGRAM:
            self.seconds.append(duration_secs)

    def _found(self, event: str, **kwargs: str | int) -> None:
        self.cached += event == CACHED

    def fields(self) -> dict[str, float]:
        """How many were made, how many of these came from the persistent cache, and the seconds
        that this took.
        """
        total = round(sum(self.seconds), 2)
        return {"made": len(self.seconds), "cached": self.cached, "seconds": total}
