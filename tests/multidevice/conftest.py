"""A tiny decoder on eight fake devices; elsewhere these tests are not collected.

`tests/test_multidevice.py` runs them in a process of their own.
"""

from collections.abc import Callable

import jax
import jax.random as jr
import pytest
from jaxtyping import PRNGKeyArray

from purepost.models import Config, Decoder, init_decoder

DEVICES = 8
collect_ignore_glob = [] if jax.device_count() == DEVICES else ["test_*.py"]

_lowered: list[str] = []


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        _lowered.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture
def programs() -> Callable[[], int]:
    """How many programs have been lowered so far, a new sharding of the same one included."""
    return lambda: len(_lowered)


@pytest.fixture(scope="session")
def config() -> Config:
    return Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )


@pytest.fixture(scope="session")
def model(config: Config) -> Decoder:
    return init_decoder(jr.key(0), config)


@pytest.fixture
def key() -> PRNGKeyArray:
    return jr.key(1)
