"""What README.md claims: its example runs, its tables list what the package has."""

import inspect
import re
from pathlib import Path

import pytest

from purepost import algorithms
from purepost.models.hub import families

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose header line starts so."""
    table = README.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block, as it stands."""
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    exec(compile(code.group(1), "README.md", "exec"), {"__name__": "readme"})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]


def test_the_table_lists_every_algorithm_with_its_paper() -> None:
    """No more and no fewer than the package exports; the paper stands in the file."""
    exported = {n for n, f in inspect.getmembers(algorithms, inspect.isfunction) if n[0] != "_"}
    table = rows("algorithm")
    assert {name.strip("`") for name, _, _ in table} == exported
    for name, paper, file in table:
        text = (ROOT / "src/purepost" / file).read_text(encoding="utf-8")
        identifier = re.search(r"\d{4}\.\d{4,5}", paper)
        assert identifier is not None and identifier.group() in text
        assert f"def {name.strip('`')}(" in text


def test_the_table_lists_model_families_that_load() -> None:
    """No more and no fewer than there are, each by the `model_type` of its checkpoints."""
    listed = set()
    for name, _, file in rows("model family"):
        found = re.search(r"`(\w+)`", name)
        assert found is not None and (ROOT / "src/purepost" / file).is_file()
        listed.add(found.group(1))
    assert listed == set(families.FAMILIES)


def test_the_tree_names_what_is_there() -> None:
    """Every file and folder that the tree names exists."""
    tree = README.split("## The tree", 1)[1].split("```")[1]
    for line in tree.splitlines():
        if found := re.match(r"  (\S+)", line):
            assert (ROOT / "src/purepost" / found.group(1)).exists(), line
