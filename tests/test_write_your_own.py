"""docs/write_your_own.md: its code runs as it stands, its links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "write_your_own.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=["composed", "from scratch"])
def test_what_one_writes_oneself_keeps_the_contract(code: str) -> None:
    """Each block is a file with a test of its own."""
    names: dict[str, Any] = {"__name__": "write_your_own"}
    exec(compile(code, "docs/write_your_own.md", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_the_first_one_has_at_most_25_lines() -> None:
    """Of code: blank ones do not count."""
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 25


def test_links_lead_somewhere() -> None:
    """Every relative one."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE):
        assert (DOCS / target).exists(), target
