"""The public functions and classes of the package, from its source: most frameworks are not installed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from everystep import errors

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "everystep"

FRAMEWORKS = ("accelerate", "chainer", "deepspeed", "jax", "keras", "lightning", "tensorflow", "transformers")
MODULES = (
    "",
    "drill",
    "inspect",
    "shelf",
    "shelf.contents",
    "universal",
    "view",
    *(f"integrations.{name}" for name in ("data", "dcp", "sklearn", *FRAMEWORKS)),
)
_ON_FIRST_USE = ("", "integrations.sklearn", "integrations.deepspeed", "integrations.keras")
"""Of these, names are imported when they are first used."""


def _tree(module: str) -> ast.Module:
    where = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    file = where / "__init__.py" if where.is_dir() else where.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


def public_names(module: str) -> list[str]:
    """The names that a module offers."""
    if module in _ON_FIRST_USE:
        package = importlib.import_module(f"everystep.{module}".rstrip("."))
        return list(package.__all__)
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    defined = (node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return [node.name for node in defined if not node.name.startswith("_")]


def is_error(node: ast.ClassDef) -> bool:
    """Whether a class is an exception."""
    bases = [ast.unparse(base) for base in node.bases]
    return node.name in vars(errors) or any(base.endswith(("Error", "Exception")) for base in bases)


def definition(module: str, name: str) -> ast.stmt | None:
    """The function or class that a name of a module is, wherever it is defined."""
    if module in _ON_FIRST_USE:
        package: Any = importlib.import_module(f"everystep.{module}".rstrip("."))
        home = package._HOME_OF[name]
        if home == "everystep":
            return None  # a module
        return definition(f"{module}.{home}" if module else home.removeprefix("everystep."), name)
    for node in ast.walk(_tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everystep"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition((node.module or "").removeprefix("everystep").lstrip("."), alias.name)
    return None
