"""Every argument of every public call is explained under ``Args:``, which the reference shows as a table."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import everystep
from support.public_source import MODULES, definition, is_error, public_names

HERE = ("inspect", "universal", "view")
"""Public modules that are imported. Those of integrations need their frameworks: their source is read."""
MADE_BY_CALLS = {"Checkpoint", "PendingSave", "PageServer"}
"""Users get these from calls, and never construct them."""
OF_INTEGRATIONS = {
    "chainer": {"Announced", "Reader", "Serialized", "Snapshot", "Writer"},
    "deepspeed": {"EverystepEngine"},
    "jax": {"Pytree"},
}
"""The same, of integrations."""
OF_OTHERS = {"GaussianMixture", "KMeans", "MiniBatchKMeans"}
"""Their arguments are those of scikit-learn's classes, which explain them."""
SHOWN = {"PendingSave": {"done", "result", "exception", "progress"}}
"""What the reference shows of a class, if that is not all of it (tools/site_pages.py)."""
_SECTION = re.compile(r"^(Args|Attributes):\n((?:    .*\n|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)


def public_objects() -> Iterator[tuple[str, Any]]:
    for name in everystep.__all__:
        found = getattr(everystep, name)
        if not inspect.ismodule(found):
            yield name, found
    for module in HERE:
        home = importlib.import_module(f"everystep.{module}")
        for name in home.__all__:
            yield f"{module}.{name}", getattr(home, name)


def listed(document: str | None, *sections: str) -> set[str]:
    """The names in these sections of a docstring."""
    found = _SECTION.finditer(inspect.cleandoc(document or "") + "\n")
    texts = [section[2] for section in found if section[1] in sections]
    names = (match[1] for text in texts for match in _ARGUMENT.finditer(text))
    return {name.strip("* ") for group in names for name in group.split(",")}


def arguments(call: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(call).parameters
    return {name for name in parameters if name not in ("self", "cls") and name[0] != "_"}


def missing() -> Iterator[str]:
    """Each argument that is not explained, and each explanation of what is no argument."""
    for name, found in public_objects():
        if not inspect.isclass(found):
            if inspect.isfunction(found):
                yield from differences(name, arguments(found), listed(found.__doc__, "Args"))
            continue
        if issubclass(found, BaseException) or found.__name__ in MADE_BY_CALLS:
            pass
        elif dataclasses.is_dataclass(found) or hasattr(found, "__struct_fields__"):
            every = getattr(found, "__struct_fields__", None) or [at.name for at in dataclasses.fields(found)]
            fields = {field for field in every if field[0] != "_"}
            yield from differences(name, fields, listed(found.__doc__, "Args", "Attributes"))
        elif "__init__" in vars(found):
            known = listed(found.__doc__, "Args") | listed(found.__init__.__doc__, "Args")
            yield from differences(name, arguments(found.__init__), known)
        for member, value in vars(found).items():
            call = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            shown = member in SHOWN.get(found.__name__, {member}) and member[0] != "_"
            if shown and inspect.isfunction(call):
                yield from differences(f"{name}.{member}", arguments(call), listed(call.__doc__, "Args"))


def missing_in_source() -> Iterator[str]:
    """The same for functions and constructors of integrations."""
    for module in (name for name in MODULES if name.startswith("integrations.")):
        made = OF_INTEGRATIONS.get(module.removeprefix("integrations."), set()) | OF_OTHERS
        for name in public_names(module):
            node = definition(module, name)
            documents = [ast.get_docstring(node)] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.ClassDef) and name not in made and not is_error(node):
                node = next((item for item in node.body if getattr(item, "name", "") == "__init__"), None)
            if isinstance(node, ast.FunctionDef):
                documents.append(ast.get_docstring(node))
                known = {found for document in documents for found in listed(document, "Args")}
                yield from differences(f"{module}.{name}", arguments_in(node), known)


def arguments_in(node: ast.FunctionDef) -> set[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {found.arg for found in every if found is not None and found.arg != "self" and found.arg[0] != "_"}


def differences(name: str, there: set[str], explained: set[str]) -> Iterator[str]:
    yield from (f"{name}({argument}) is not explained" for argument in sorted(there - explained))
    yield from (f"{name}({argument}) does not exist" for argument in sorted(explained - there))


def test_every_argument_is_listed_where_it_is_explained() -> None:
    assert list(missing()) == []


def test_every_argument_of_an_integration_is_listed() -> None:
    assert list(missing_in_source()) == []


def test_what_is_not_listed_is_found() -> None:
    def call(a: int, b: int) -> None:
        """Does it.

        Args:
            a: The first.
            c: Of another call.
        """

    assert list(differences("call", arguments(call), listed(call.__doc__, "Args"))) == [
        "call(b) is not explained",
        "call(c) does not exist",
    ]
