"""Modules of the package import each other one way: no circle hides the order of things."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import mb_data
import pytest

ROOT = Path(mb_data.__file__).parent


def imported(path):
    """Modules of this package that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_circles():
    modules = {
        ".".join(("mb_data", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in ROOT.rglob("*.py")
    }
    packages = {name for name in modules if name.endswith(".__init__")}
    graph = {
        name: {other for other in imported(path) if other in modules and other != name}
        for name, path in modules.items()
        if name not in packages
    }
    assert len(graph) > 30
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
