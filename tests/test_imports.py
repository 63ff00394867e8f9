"""Dependencies point one way: what each part of the package may import, name and touch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "purepost"

BOTTOM = {"types", "mean", "tree"}
# These serve the runs; they import no algorithm.
UPPER = set("sharding distributed checkpoint track evaluate guards data text rewards".split())
UPPER |= {"tools", "environments"}
# Part → the other parts it may import. One that is not named may import all but algorithms. Nobody
# imports the package's root: its names are for users, and live in the parts.
MAY_IMPORT = {
    "types": BOTTOM,
    "mean": BOTTOM,
    "tree": BOTTOM,
    "losses": BOTTOM,
    "advantages": BOTTOM,
    "filters": BOTTOM | {"advantages"},
    "turns": BOTTOM | {"advantages"},
    "policy_batch": BOTTOM | {"losses", "advantages", "filters", "models", "rollout"},
    "follow": BOTTOM | {"algorithm"},
    "adapt": BOTTOM | {"algorithm", "follow"},
    "weights": BOTTOM,
    "models": BOTTOM | {"weights"},
    "models.hub": BOTTOM | {"weights", "models", "text"},
    "rollout": BOTTOM | {"weights", "models"},
    "accumulate": BOTTOM,
    "offload": BOTTOM,
    "algorithm": BOTTOM | {"accumulate", "offload"},
    "loop": BOTTOM | {"algorithm"},
}
CORE = {*MAY_IMPORT, *UPPER}

MAKES_AXES = {"P", "PartitionSpec", "NamedSharding", "Mesh", "make_mesh", "AbstractMesh"}
WEIGHT_TYPES = {"LowRank", "Quantized"}
FILE_MODULES = {"pathlib", "shutil", "tempfile"}
FILE_CALLS = {"open", "makedirs", "mkdir", "read_text", "read_bytes", "write_text", "write_bytes"}
TOUCHES_FILES = {"data", "text", "rewards", "checkpoint", "track", "models.hub", "tools"}


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """(dotted name below purepost, part, syntax tree) of every module; the root's name is ""."""
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts).removesuffix("__init__").rstrip(".")
        yield name, part_of(name), ast.parse(path.read_text(encoding="utf-8"))


def part_of(name: str) -> str:
    """The part of the package that the module `name` belongs to."""
    return "models.hub" if f"{name}.".startswith("models.hub.") else name.partition(".")[0]


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(name: str, module: ast.Module) -> Iterator[tuple[str, str]]:
    """(module in full, imported name or "") of every import statement, at any depth."""
    is_package = SRC.joinpath(*name.split("."), "__init__.py").is_file()
    package = ["purepost", *name.split(".")][: None if is_package else -1] if name else ["purepost"]
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                below = f"{origin}.{alias.name}".removeprefix("purepost.")
                inside = origin.partition(".")[0] == "purepost" and is_module(below)
                yield (f"{origin}.{alias.name}", "") if inside else (origin, alias.name)


def inner_imports(name: str, module: ast.Module) -> Iterator[tuple[str, str]]:
    """Of these, the imports of purepost itself, named below it; its root is ""."""
    for origin, imported in imports(name, module):
        if origin.partition(".")[0] == "purepost":
            yield origin.partition(".")[2], imported


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def test_resolves_imports() -> None:
    module = ast.parse(
        "import jax.numpy\n"
        "from . import tree\n"
        "from .mean import Mean\n"
        "from purepost.loop import fuse\n"
    )
    assert list(imports("algorithm", module)) == [
        ("jax.numpy", ""),
        ("purepost.tree", ""),
        ("purepost.mean", "Mean"),
        ("purepost.loop", "fuse"),
    ]
    deeper = ast.parse("def f():\n    from ..types import Rows")
    assert list(imports("algorithms.new", deeper)) == [("purepost.types", "Rows")]
    assert list(imports("algorithms", deeper)) == [("purepost.types", "Rows")]


def test_dependencies_point_one_way() -> None:
    wrong = []
    for name, part, module in modules():
        for origin, _ in inner_imports(name, module) if name else ():
            target = part_of(origin)
            allowed = MAY_IMPORT.get(part, CORE if part != "algorithms" else {*CORE, "algorithms"})
            if target != part and target not in allowed:
                wrong.append(f"purepost.{name} imports purepost.{origin}".rstrip("."))
    assert not wrong, "\n".join(wrong)


def test_algorithms_import_only_their_parents_factory() -> None:
    wrong = []
    for name, part, module in modules():
        if part != "algorithms" or name == "algorithms":
            continue
        for origin, imported in inner_imports(name, module):
            if part_of(origin) != "algorithms" or origin == name:
                continue
            # The parent's factory bears its file's name; its types are what a signature needs.
            is_factory = origin == f"algorithms.{imported}"
            if not (is_factory or (imported[:1].isupper() and not imported.isupper())):
                wrong.append(f"purepost.{name} imports {imported or 'all'} of purepost.{origin}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_experiments_or_tests() -> None:
    for name, _, module in modules():
        tops = {origin.partition(".")[0] for origin, _ in imports(name, module)}
        assert not tops & {"experiments", "tests"}, f"purepost.{name} imports {tops}"


def test_only_sharding_names_mesh_axes() -> None:
    for name, part, module in modules():
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        for call in calls if part != "sharding" else ():
            if called(call) in MAKES_AXES:
                constants = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant)]
                axes = [value for value in constants if isinstance(value, str)]
                assert not axes, f"purepost.{name}, line {call.lineno}: mesh axes {axes}"


def test_only_weights_knows_the_weight_types() -> None:
    for name, part, module in modules():
        if part == "weights" or not name:
            continue
        for node in ast.walk(module):
            match node:
                case ast.Name(id=used) | ast.Attribute(attr=used) | ast.alias(name=used):
                    assert used not in WEIGHT_TYPES, f"purepost.{name} names {used}"


def test_only_some_parts_touch_files() -> None:
    for name, part, module in modules():
        if part in TOUCHES_FILES:
            continue
        found = {origin.partition(".")[0] for origin, _ in imports(name, module)} & FILE_MODULES
        found |= {called(n) for n in ast.walk(module) if isinstance(n, ast.Call)} & FILE_CALLS
        assert not found, f"purepost.{name} uses {sorted(found)}"


def test_the_core_loads_no_optional_package() -> None:
    optional = (
        "orbax tokenizers jinja2 huggingface_hub rich safetensors beartype gguf matplotlib "
        "tensorboardX reasoning_gym pyarrow datasets"
    ).split()
    code = f"import sys, purepost; print(*sorted(set({optional}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


@pytest.mark.parametrize("link", ["algorithms", "models"])
def test_root_links_are_for_readers_only(link: str) -> None:
    assert (ROOT / link).readlink() == Path("src/purepost") / link
    run = subprocess.run(
        [sys.executable, "-c", f"import {link}"], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 1
    assert f"ImportError: expected the name purepost.{link}, got '{link}'" in run.stderr
    assert f"write `import purepost.{link}`" in run.stderr
