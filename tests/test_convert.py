"""The convert command: every form to every other, and what the check says of it."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepost.convert import main
from purepost.models.hub import load, load_adapter
from purepost.models.hub.safetensors import read_checkpoint, save_tensors
from purepost.weights import merge
from tests.models.hub.gguf_files import GOLDEN, metadata, stored_tensors, write_gguf

PROMPT = ["--prompt", "Hello, world!"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of the tied golden model."""
    config, tensors = read_checkpoint(GOLDEN / "tiny-tied")
    config["rope_theta"] = 10000.0
    stored = stored_tensors(config, {k: tensors[k].astype(np.float32) for k in tensors})
    path = tmp_path_factory.mktemp("convert") / "m.gguf"
    write_gguf(path, stored, metadata(config))
    return path


def assert_same(a: Path, b: Path) -> None:
    x, y = (load(path, dtype=None).model for path in (a, b))
    assert x.config == y.config
    for p, q in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert p.dtype == q.dtype
        np.testing.assert_array_equal(p, q)


def test_from_gguf_to_orbax_to_hugging_face(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orbax, hf = str(tmp_path / "orbax"), str(tmp_path / "hf")
    assert main([str(source), orbax, "--orbax", "--check", *PROMPT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wrote {orbax}"
    named = [line.split()[:2] for line in lines[2:4]]
    assert named == [["layer", "0"], ["layer", "1"]]
    assert [line.split()[0] for line in lines[4:]] == ["hidden", "logits"]
    assert all(float(line.split()[-1]) == 0 for line in lines[2:])
    assert main([orbax, hf]) == 0
    for path in (orbax, hf):
        assert_same(source, Path(path))
    assert main([hf, str(tmp_path / "again"), "--orbax"]) == 0
    assert_same(source, tmp_path / "again")


def test_the_dtype_is_kept_or_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = GOLDEN / "tiny-tied"
    assert main([str(bf16), str(tmp_path / "kept")]) == 0
    assert_same(bf16, tmp_path / "kept")
    full = str(GOLDEN / "tiny-llama3")
    half = [full, str(tmp_path / "half"), "--dtype", "bfloat16", "--check", *PROMPT]
    assert main(half) == 0
    assert load(tmp_path / "half", dtype=None).model.embed.dtype == jnp.bfloat16
    assert float(capsys.readouterr().out.splitlines()[-1].split()[-1]) > 1e-4
    half[1] = str(tmp_path / "strict")
    assert main([*half, "--tolerance", "1e-6"]) == 1
    assert "logits" in (out := capsys.readouterr().out) and "beyond 1e-06" in out


def test_an_adapter_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, target = GOLDEN / "tiny-llama3", tmp_path / "merged"
    adapter = ["--adapter", str(GOLDEN / "adapter")]
    assert main([str(base), str(target), *adapter, "--check", *PROMPT]) == 0
    merged = merge(load_adapter(load(base).model, GOLDEN / "adapter"))
    found = load(target).model
    np.testing.assert_array_equal(found.layers.attention.q, merged.layers.attention.q)
    assert 0 < float(capsys.readouterr().out.splitlines()[-1].split()[-1]) < 1e-5


def test_a_result_that_is_another_model_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that spoils one tensor of the last layer is found out there."""

    def spoil(model: object, tokenizer: object, target: str) -> None:
        shutil.copytree(GOLDEN / "tiny-llama3", target)
        _, tensors = read_checkpoint(GOLDEN / "tiny-llama3")
        changed = {name: tensors[name] for name in tensors}
        name = "model.layers.1.self_attn.k_proj.weight"
        changed[name] = changed[name] + np.float32(0.1)
        save_tensors(Path(target) / "model.safetensors", changed)
        tokenizer_config = Path(target) / "tokenizer_config.json"
        config = json.loads(tokenizer_config.read_text())
        (Path(target) / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer_config.write_text(json.dumps({**config, "chat_template": "another"}))

    monkeypatch.setattr("purepost.convert.save", spoil)
    assert main([str(GOLDEN / "tiny-llama3"), str(tmp_path / "m"), "--check", *PROMPT]) == 1
    out = capsys.readouterr().out.splitlines()
    beyond = [line.split()[0:2] for line in out if "beyond" in line]
    assert ["layer", "0"] not in beyond and ["layer", "1"] in beyond
    assert "the chat templates differ" in out


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing.gguf"), str(tmp_path / "m")]) == 2
    assert main([str(GOLDEN / "tiny-tied"), str(GOLDEN)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: expected a model at")
    assert second.startswith("error: expected nothing at")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "SOURCE is a directory in Hugging Face layout" in capsys.readouterr().out
