"""The tests of tests/multidevice, in a process that has eight fake devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_on_eight_devices() -> None:
    flags = (  # compile time is most of it: leave the machine code as it comes
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/multidevice", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
