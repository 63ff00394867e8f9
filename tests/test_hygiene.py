"""The house rules that a machine can check: sizes, banned names, docstrings, papers."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "purepost"
FILES = sorted(SRC.rglob("*.py"))
OURS = [*FILES, *sorted((ROOT / "experiments").rglob("*.py")), *sorted(ROOT.glob("tests/**/*.py"))]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

BANNED = {"getattr", "hasattr", "NotImplementedError"}
ARXIV = re.compile(r"(?<![\d.])\d{2}(?:0[1-9]|1[0-2])\.\d{4,5}(?![\d.]*\d)")


def show(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """The public functions and classes of a module, and the public methods of its classes."""
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", OURS, ids=show)
def test_files_and_functions_are_short(path: Path) -> None:
    most = 150 if path.parent == SRC / "algorithms" else 400
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= most, f"{show(path)} has {lines} lines, at most {most} are allowed"
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{show(path)}: {node.name} has {length} lines, at most 60"


@pytest.mark.parametrize("path", FILES, ids=show)
def test_source_has_no_banned_names(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            assert node.id not in BANNED, f"{show(path)}, line {node.lineno}: {node.id}"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__", f"{show(path)}: imports from __future__"
    marks = re.findall(r"\b(?:TODO|FIXME|XXX)\b", path.read_text(encoding="utf-8"))
    assert not marks, f"{show(path)}: {marks}"


@pytest.mark.parametrize("path", FILES, ids=show)
def test_everything_public_has_a_docstring(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module), f"{show(path)} has no docstring"
    bare = [name for name, node in public(module.body) if not ast.get_docstring(node)]
    assert not bare, f"{show(path)}: no docstring on {', '.join(bare)}"


def test_every_cited_paper_is_indexed() -> None:
    cited = {
        identifier: show(path)
        for path in FILES
        for identifier in ARXIV.findall(path.read_text(encoding="utf-8"))
    }
    papers = ROOT / "PAPERS.md"
    index = papers.read_text(encoding="utf-8") if papers.exists() else ""
    missing = [f"{key} ({where})" for key, where in sorted(cited.items()) if key not in index]
    assert not missing, f"PAPERS.md does not list: {', '.join(missing)}"


def test_arxiv_identifiers_are_recognised() -> None:
    text = "DeepSeekMath, 2402.03300, eq. 3; see 2503.20783. Not 1234.5678, 0.2402.03300 or 3.1415"
    assert ARXIV.findall(text) == ["2402.03300", "2503.20783"]
