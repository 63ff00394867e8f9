"""Checkpoints in Hugging Face layout: shards, dtypes, and files that do not fit (case 18)."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from purepost.models.hub.safetensors import read_checkpoint, save_tensors, write_checkpoint

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "c": np.array([1.0, 1.0078125, -2.5], ml_dtypes.bfloat16),
    "d": np.arange(4, dtype=np.float16)[::2],
}
CONFIG = {"model_type": "llama", "note": "ü"}


def assert_equal(directory: Path) -> None:
    config, tensors = read_checkpoint(directory)
    assert config == CONFIG
    assert set(tensors) == set(TENSORS) and len(tensors) == 4
    for name, expected in TENSORS.items():
        assert tensors[name].dtype == expected.dtype
        np.testing.assert_array_equal(tensors[name], expected)


def test_one_file_keeps_values_and_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "deep" / "model", CONFIG, TENSORS)
    assert_equal(tmp_path / "deep" / "model")
    names = sorted(path.name for path in (tmp_path / "deep" / "model").iterdir())
    assert names == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_shards_by_size_with_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIG, TENSORS, max_shard_bytes=30)
    assert_equal(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    # 24 bytes each for a and b, 6 and 4 for c and d: the last three do not fit into 30 either.
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert index["weight_map"] == {"a": first, "b": second, "c": second, "d": third}
    assert index["metadata"] == {"total_size": 58}


def test_a_stale_shard_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIG, TENSORS, max_shard_bytes=30)
    save_tensors(tmp_path / "model" / "model-00004-of-00009.safetensors", {"a": np.zeros(1)})
    assert_equal(tmp_path / "model")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIG, TENSORS, max_shard_bytes=30)
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors"):
        read_checkpoint(tmp_path / "model")


def test_a_shard_without_its_tensor_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIG, TENSORS, max_shard_bytes=30)
    save_tensors(tmp_path / "model" / "model-00003-of-00003.safetensors", {"z": np.zeros(1)})
    with pytest.raises(ValueError, match=r"model-00003-of-00003.safetensors to hold \['d'\]"):
        read_checkpoint(tmp_path / "model")


def test_missing_and_broken_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="expected model.safetensors .*pytorch_model.bin"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        read_checkpoint(tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match=f"expected nothing at .*{name}"):
            write_checkpoint(tmp_path / name, CONFIG, TENSORS)
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", CONFIG, TENSORS)
    assert_equal(tmp_path / "empty")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        assert (path / "model.safetensors").is_file()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path / "model", CONFIG, TENSORS, also=fail)
    assert list(tmp_path.iterdir()) == []
