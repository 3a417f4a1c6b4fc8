"""Which system wrote a checkpoint: asks the readers of all systems, in their order."""

from __future__ import annotations

import os

from everystep.errors import CheckpointNotFound, UnsupportedSource
from everystep.paths import local_path
from everystep.store.names import PARTIAL, RETIRED
from everystep.universal.readers import READERS, SystemReader
from everystep.universal.source import Source
from everystep.universal.spec import Spec
from everystep.universal.whole_source import apply_spec

_SHOWN = 6
_SHELF = b"esshelf\n"
"""How the file of a shelf begins (docs/shelf-format.md)."""


def kinds() -> list[str]:
    """The names of the systems whose checkpoints can be read."""
    return [reader.kind for reader in READERS]


def recognise(path: str | os.PathLike[str]) -> str:
    """The kind of a foreign checkpoint.

    Raises `UnsupportedSource` if no known system wrote it; the message says what was looked for and found.

    Args:
        path: The checkpoint.
    """
    where = local_path(path)
    found = find_reader(where)
    if found is None:
        if not os.path.exists(where):
            raise CheckpointNotFound(f"there is no checkpoint at {where}")
        raise UnsupportedSource(f"{where} is not a checkpoint that is known. {findings(where)}")
    return found.kind


def find_reader(path: str) -> SystemReader | None:
    """The reader of a checkpoint; None if no reader knows it."""
    if path.endswith((PARTIAL, RETIRED)) or not os.path.exists(path):
        return None
    return next((reader for reader in READERS if reader.looks_like(path) is not None), None)


def reader_of(kind: str) -> SystemReader | None:
    """The reader of a kind; None if there is none of this name."""
    return next((reader for reader in READERS if reader.kind == kind), None)


def describe(
    path: str | os.PathLike[str],
    kind: str = "auto",
    spec: Spec | None = None,
    as_training: bool | None = None,
) -> Source:
    """The description of a foreign checkpoint.

    Args:
        path: The checkpoint.
        kind: The system that wrote it. By default its files say it.
        spec: How it lays out its parameters.
        as_training: Whether to arrange it as a training state, not as the system's own library loads it. By
            default only what a training wrote is arranged (DeepSpeed, Megatron, Lightning, a Trainer, Hugging
            Face models), and what a `spec` is for.
    """
    where = local_path(path)
    if kind == "auto":
        kind = recognise(where)
    reader = reader_of(kind)
    if reader is None:
        raise UnsupportedSource(f"unknown kind of checkpoint {kind!r}: known are {', '.join(kinds())}")
    if not os.path.exists(where):
        raise CheckpointNotFound(f"there is no checkpoint at {where}")
    found = reader.describe(where, spec, True if spec is not None else as_training)
    if as_training is False and found.arranged:
        raise UnsupportedSource(
            f"{where}: a checkpoint of kind {kind!r} is always arranged as a training state"
        )
    return found if spec is None or reader.parameters is not None else apply_spec(found, spec)


def findings(path: str) -> str:
    """What was looked for, and what is there."""
    wanted = "".join(f"\n  {reader.kind}: {reader.wanted}" for reader in READERS)
    return f"Found {_contents(path)}. Looked for checkpoints of other systems:{wanted}"


def brief_findings(path: str) -> str:
    """The same in a line, for a path that may just be a wrong one."""
    kinds = ", ".join(reader.kind for reader in READERS)
    return f"Found {_contents(path)}. Looked for checkpoints of other systems, too: {kinds}"


def _contents(path: str) -> str:
    try:
        if not os.path.isdir(path):
            with open(path, "rb") as file:
                begin = file.read(8)
            if begin == _SHELF:
                return "a shelf, which `everystep shelf ls` lists"
            if not begin:
                return "an empty file"
            return f"a file of {os.path.getsize(path)} bytes that begins with {begin!r}"
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"nothing that can be read ({error.strerror})"
    if not names:
        return "an empty directory"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
