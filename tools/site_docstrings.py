"""An extension of griffe (mkdocs.yml): shows examples in docstrings, which begin with ``>>>``, as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1\S.*(?:\n|\Z)|\1 .*(?:\n|\Z))*", re.MULTILINE)


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(as_code, obj.docstring.value + "\n")


def as_code(found: re.Match[str]) -> str:
    margin = found.group(1)
    return f"{margin}```pycon\n{found.group().rstrip()}\n{margin}```\n"
