"""Modules of the package import each other in one direction, also inside of functions and for types only."""

from __future__ import annotations

import ast
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def module_name(file: Path, source: Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: Collection[str]) -> set[str]:
    """The modules that import statements name, wherever these stand."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "relative imports are not followed here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in modules else node.module)
    return names & set(modules)


def import_graph(source: Path) -> dict[str, set[str]]:
    """Which modules each module imports. The root package is left out: its names resolve on first use."""
    files = {module_name(file, source): file for file in source.rglob("*.py")}
    inner = {name for name in files if "." in name}
    return {name: imported(ast.parse(files[name].read_text()), inner) - {name} for name in inner}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize(
    ("source", "module", "uses"),
    [
        ("src", "everystep.engine", "everystep.engine.transfer"),
        ("study/src", "everystep_study.harness.runner", "everystep_study.harness.suite"),
    ],
)
def test_no_module_imports_itself_by_way_of_others(source: str, module: str, uses: str) -> None:
    graph = import_graph(ROOT / source)
    assert uses in graph[module], "the graph is empty"
    assert cycle(graph) == []


@pytest.mark.parametrize(
    "back",
    [
        "from house.floor import Room",
        "def late():\n    from house import floor",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.floor",
    ],
)
def test_cycles_are_found_also_where_an_import_is_late_or_for_types(tmp_path: Path, back: str) -> None:
    (tmp_path / "house").mkdir()
    (tmp_path / "house/__init__.py").write_text("")
    (tmp_path / "house/floor.py").write_text("from house.wall import Window\n")
    (tmp_path / "house/wall.py").write_text(back)
    assert set(cycle(import_graph(tmp_path))) == {"house.floor", "house.wall"}
