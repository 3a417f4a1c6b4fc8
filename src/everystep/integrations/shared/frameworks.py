"""Importing a framework: whether its version is supported, and names that are imported on first use.

A module of an integration checks the version before it imports anything of the framework.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from importlib import metadata


def require(package: str, oldest: str, below: str, *, extra: str, builds: tuple[str, ...] = ()) -> None:
    """`ImportError` unless the package is installed in a version of at least `oldest` and below `below`.

    `builds`: other names under which the same package is distributed.
    """
    supported = f"{package} from {oldest} up to, not including, {below}"
    found = next(filter(None, map(_version, (package, *builds))), None)
    if found is None:
        raise ImportError(
            f"everystep.integrations.{extra} needs {package}, which is not installed: "
            f"pip install 'everystep[{extra}]' ({supported})"
        )
    if not _numbers(oldest) <= _numbers(found) < _numbers(below):
        older = _numbers(found) < _numbers(oldest)
        raise ImportError(
            f"everystep.integrations.{extra} does not know {package} {found}, which is too "
            f"{'old' if older else 'new'}: it supports {supported}. "
            f"Install one of these versions: pip install 'everystep[{extra}]'"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: those of 2.6.0rc1 are 2, 6, 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


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
