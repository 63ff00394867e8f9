"""The code of docs/ runs as it stands there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_environments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "environments.md").read_text(encoding="utf-8")
    names = {"MODEL": Path(__file__).parent / "golden" / "qwen2"}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "environments.md", "exec"), names)
    out = capsys.readouterr().out
    assert "42" in out and "True" in out
    assert len(list((tmp_path / "runs" / "agents" / "journal").iterdir())) == 2
