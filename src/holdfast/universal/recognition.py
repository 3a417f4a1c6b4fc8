"""Which system wrote a checkpoint: asks the readers of all systems, in their order."""

from __future__ import annotations

import os
from types import ModuleType

from holdfast.errors import CheckpointNotFound, UnsupportedSource
from holdfast.store.names import PARTIAL, RETIRED
from holdfast.universal.source import Source
from holdfast.universal.sources import SOURCES
from holdfast.universal.spec import Spec
from holdfast.universal.whole_source import apply_spec

_SHOWN = 6


def kinds() -> list[str]:
    """The names of the systems whose checkpoints can be read."""
    return [_kind(module) for module in SOURCES]


def recognise(path: str | os.PathLike[str]) -> str:
    """The kind of the checkpoint at a path; `UnsupportedSource` says what was looked for and found."""
    where = os.path.abspath(os.fspath(path))
    found = find_kind(where)
    if found is None:
        if not os.path.exists(where):
            raise CheckpointNotFound(f"there is no checkpoint at {where}")
        raise UnsupportedSource(f"{where} is not a checkpoint that is known. {findings(where)}")
    return _kind(found)


def find_kind(path: str) -> ModuleType | None:
    """The reader of a checkpoint; None if no reader knows it."""
    if path.endswith((PARTIAL, RETIRED)) or not os.path.exists(path):
        return None
    return next((module for module in SOURCES if module.looks_like(path) is not None), None)


def module_of(kind: str) -> ModuleType | None:
    """The reader of a kind; None if there is none of this name."""
    return next((module for module in SOURCES if _kind(module) == kind), None)


def describe(path: str | os.PathLike[str], kind: str = "auto", spec: Spec | None = None) -> Source:
    """The description of a foreign checkpoint. `kind`: the system that wrote it, if that is known."""
    where = os.path.abspath(os.fspath(path))
    if kind == "auto":
        kind = recognise(where)
    for module in SOURCES:
        if _kind(module) == kind:
            if not os.path.exists(where):
                raise CheckpointNotFound(f"there is no checkpoint at {where}")
            found: Source = module.describe(where, spec)
            # A module without `parameters` describes whole parameters; the spec is applied to those.
            return found if spec is None or hasattr(module, "parameters") else apply_spec(found, spec)
    raise UnsupportedSource(f"unknown kind of checkpoint {kind!r}: known are {', '.join(kinds())}")


def findings(path: str) -> str:
    """What was looked for, and what is there."""
    wanted = "; ".join(f"{_kind(module)} ({_wanted(module)})" for module in SOURCES)
    return f"Looked for checkpoints of other systems: {wanted}. Found {_contents(path)}"


def _contents(path: str) -> str:
    try:
        if not os.path.isdir(path):
            with open(path, "rb") as file:
                begin = file.read(8)
            return f"a file of {os.path.getsize(path)} bytes that begins with {begin!r}"
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"nothing that can be read ({error.strerror})"
    if not names:
        return "an empty directory"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _kind(module: ModuleType) -> str:
    """The name that ``--from`` takes: that of the module, unless it says another."""
    return str(getattr(module, "KIND", module.__name__.rpartition(".")[2].replace("_", "-")))


def _wanted(module: ModuleType) -> str:
    """What a reader looks for, in words; else what its module says it is about."""
    first = (module.__doc__ or "").strip().partition("\n")[0].rstrip(".:")
    return str(getattr(module, "WANTED", first))
