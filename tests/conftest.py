"""Settings of every test: the CPU, strict dtypes, cached compilation, reproducible hypotheses."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.random as jr
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import PRNGKeyArray

CACHE = Path(__file__).parents[1] / ".cache" / "jax"

# JAX_PLATFORMS=cuda runs the same tests on a GPU.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# Programs here are tiny: almost all of the time would go into compiling them well.
jax.config.update("jax_disable_most_optimizations", True)
if jax.__version_info__ < (0, 11):  # a flag that XLA no longer knows ends the process
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}"
    )

settings.register_profile(
    "purepost",
    deadline=None,  # the first example of a shape compiles
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("purepost")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares compiled programs runs in one process: a file, of the contract a probe."""
    for item in items:
        file, _, test = item.nodeid.partition("::")
        case = test.partition("[")[2] if file.endswith("test_contract.py") else ""
        item.add_marker(pytest.mark.xdist_group(f"{file}[{case}"))


@pytest.fixture(scope="module", autouse=True)
def fresh_programs() -> Iterator[None]:
    """Let go of a module's compiled programs: a process that holds thousands runs out of memory
    maps, and dies.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def full_compilation() -> Iterator[None]:
    """For tests that look at what was compiled: at its memory, its FLOPs, its text. The flag stays:
    XLA reads it once.
    """
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def key() -> PRNGKeyArray:
    """A fixed key."""
    return jr.key(0)
