"""The tests themselves: each asserts something, and each folder is named after the package that it tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = [TESTS.parent / "src/everystep", TESTS.parent]
"""Where a folder of tests has its counterpart: a package, or one of `study`, `examples` and `tools`."""
OF_THEIR_OWN = {"browser", "crash", "distributed", "packaging", "peers", "support"}
"""Folders for tests of several packages, with machinery of their own."""

ASSERTING = {"raises", "warns", "fail", "run_state_machine_as_test"}
"""Calls that fail a test by themselves: those of pytest, and state machines, whose rules assert."""

Functions = dict[str, ast.FunctionDef]


def called(function: ast.FunctionDef) -> Iterator[str]:
    """The names of all functions and methods that a function calls, or that functions inside of it call."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id


def without_assertion(tree: ast.Module, imported: Functions) -> list[str]:
    """The tests of a module that assert nothing, neither themselves nor by a function of the tests."""
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    known: Functions = imported | own
    asserting = {
        name for name, node in known.items() if any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
    }
    reached = ASSERTING | asserting
    while more := {name for name in known.keys() - reached if not reached.isdisjoint(called(known[name]))}:
        reached |= more
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
        and reached.isdisjoint(called(node))
    ]


def imported_functions(tree: ast.Module) -> Functions:
    """The functions that a module imports from others of the tests, and those that these call at home."""
    found: Functions = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            file = TESTS.joinpath(*node.module.split(".")).with_suffix(".py")
            if file.is_file():
                other = ast.parse(file.read_text("utf-8"))
                found |= {inner.name: inner for inner in other.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_test_asserts_something() -> None:
    found = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        if names := without_assertion(tree, imported_functions(tree)):
            found[str(file.relative_to(TESTS))] = names
    assert found == {}


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("    save(path)\n    load(path)", True),
        ("    with warnings.catch_warnings():\n        save(path)", True),
        ("    prepare()", True),
        ("    assert load(path)", False),
        ("    with pytest.raises(ValueError):\n        save(None)", False),
        ("    check(path)", False),
        ("    def inner():\n        assert load(path)\n    inner()", False),
    ],
)
def test_a_test_without_assertion_is_found(body: str, missing: bool) -> None:
    helpers = "def prepare():\n    save(path)\ndef check(path):\n    compared(path)\n"
    tree = ast.parse(f"{helpers}def compared(path):\n    assert load(path)\ndef test_it():\n{body}\n")
    assert without_assertion(tree, {}) == (["test_it"] if missing else [])


def folders(place: Path) -> set[Path]:
    """All folders with tests, relative to `place`."""
    return {file.parent.relative_to(place) for file in place.rglob("test_*.py")} - {Path()}


def test_folders_mirror_the_packages() -> None:
    found = folders(TESTS)
    assert Path("store/commit") in found
    strange = [
        str(folder)
        for folder in sorted(found)
        if folder.parts[0] not in OF_THEIR_OWN and not any((source / folder).is_dir() for source in SOURCES)
    ]
    assert strange == []
