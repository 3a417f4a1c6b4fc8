"""The stub that type checkers read says what the native module really has."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import everystep

STUB = Path(everystep.__file__).parent / "_native.pyi"


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Names, and whether there is a default. What comes before a slash has no name worth comparing."""
    plain = function.args
    named = [*plain.posonlyargs, *plain.args]
    optional = [False] * (len(named) - len(plain.defaults)) + [True] * len(plain.defaults)
    hidden = len(plain.posonlyargs)
    return [
        ("" if number < hidden else argument.arg, default)
        for number, (argument, default) in enumerate(zip(named, optional, strict=True))
        if argument.arg != "self"
    ]


def declared() -> dict[str, list[tuple[str, bool]]]:
    found = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = parameters(method)
    return found


def bound(value: Any) -> list[tuple[str, bool]]:
    ((signature, *_),) = value.__nb_signature__
    # Default values stand in it as backslash and number, and results in a notation of nanobind's own.
    (function,) = ast.parse(signature.rpartition(" -> ")[0].replace("\\", "") + ": ...").body
    assert isinstance(function, ast.FunctionDef)
    return parameters(function)


def actual() -> dict[str, list[tuple[str, bool]]]:
    native = importlib.import_module("everystep._native")
    found = {}
    for name, value in vars(native).items():
        if hasattr(value, "__nb_signature__"):
            found[name] = bound(value)
        elif isinstance(value, type):
            for inner, method in vars(value).items():
                if hasattr(method, "__nb_signature__"):
                    found[f"{name}.{inner}"] = bound(method)
    return found


def test_the_stub_declares_every_function_with_its_parameters() -> None:
    assert declared() == actual()
