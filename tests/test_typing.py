"""pyright rejects compositions that do not fit together, and accepts their right twins."""

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from purepost.algorithm import Steps

ROOT = Path(__file__).resolve().parents[1]
COMPOSITIONS = ROOT / "tests" / "compositions.py"


def expected() -> dict[int, set[str]]:
    """Line number → the rules that its comment names."""
    found = {}
    for number, line in enumerate(COMPOSITIONS.read_text(encoding="utf-8").splitlines(), 1):
        if comment := re.search(r"# expect: (.+)$", line):
            found[number] = set(comment.group(1).split(", "))
    return found


def reported(directory: Path) -> dict[int, set[str]]:
    """Line number → the rules that pyright finds broken there, in a copy: our own settings leave
    the file out.
    """
    copy = shutil.copy(COMPOSITIONS, directory)
    command = [sys.executable, "-m", "basedpyright", "--outputjson", str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = defaultdict(set)
    for diagnostic in json.loads(run.stdout)["generalDiagnostics"]:
        found[diagnostic["range"]["start"]["line"] + 1].add(diagnostic.get("rule", "syntax"))
    return dict(found)


@pytest.mark.parametrize("parent", ["grpo", "dpo", "sft", "ppo"])
def test_options_of_variants_are_the_keyword_arguments_of_their_parent(parent: str) -> None:
    """Name by name, with the same types."""
    module: Any = importlib.import_module(f"purepost.algorithms.{parent}")
    parameters = inspect.signature(vars(module)[parent]).parameters.values()
    named = {p.name: str(p.annotation) for p in parameters if p.kind == p.KEYWORD_ONLY}
    types = module.Options.__annotations__
    of_steps = {name: str(types[name]) for name in Steps.__annotations__}
    assert {name: str(of) for name, of in types.items()} == of_steps | named
    assert all(p.name == "steps" for p in parameters if p.kind == p.VAR_KEYWORD)


def test_pyright_rejects_each_wrong_composition_and_no_right_one(tmp_path: Path) -> None:
    """Exactly the errors expected, each on its line."""
    wrong = expected()
    assert len(wrong) >= 50
    assert reported(tmp_path) == wrong
