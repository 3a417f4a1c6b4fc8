"""The version of a framework that an integration is built for, checked before anything of it is used."""

from __future__ import annotations

import re
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
