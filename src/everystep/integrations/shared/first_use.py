"""Names of a package that are imported on first use, so that its other modules need no framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def names_on_first_use(
    package: str, home_of: Mapping[str, str], check: Callable[[], None] = lambda: None
) -> Callable[[str], object]:
    """The ``__getattr__`` of `package`. `home_of` says which module has a name; `check` runs before."""

    def find(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check()
        found: object = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        setattr(importlib.import_module(package), name, found)
        return found

    return find
