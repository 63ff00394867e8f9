"""What the peers need: an environment of their own each, and the model in Hugging Face layout.

`python -m experiments.benchmarks.prepare smollm2 tunix trl` makes what is missing below the cache
folder and prints where it is, as JSON. Some 4 GB are downloaded the first time.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

from purepost.models.hub.fetch import cache_directory

from .models import export
from .work import PEERS

_CHECK = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def installed(python: Path, packages: tuple[str, ...]) -> bool:
    """Whether an environment has these packages in these versions; local builds (+cpu) count."""
    if not python.exists():
        return False
    names, wanted = zip(*(p.split("==") for p in packages), strict=True)
    run = subprocess.run([python, "-c", _CHECK, *names], capture_output=True, text=True)
    got = [found.partition("+")[0] for found in run.stdout.split()]
    return run.returncode == 0 and got == list(wanted)


def environment(peer: str, directory: Path) -> Path:
    """The interpreter of a peer's environment, made if need be."""
    name, packages = PEERS[peer]
    home = directory / name
    python = home / "bin" / "python"
    if not installed(python, packages):
        print(f"installing {', '.join(packages)} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *packages], check=True)
    return python


def main(model: str, *peers: str) -> None:
    """Print {"model": directory, "python": {peer: interpreter}}."""
    directory = cache_directory() / "peerbench"
    target = export(model, directory / "purepost-models")
    pythons = {peer: str(environment(peer, directory)) for peer in peers}
    print(json.dumps({"model": str(target), "python": pythons}))


if __name__ == "__main__":
    main(*sys.argv[1:])
