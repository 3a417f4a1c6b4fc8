"""Checkpoints of other systems, and new names for leaves, without importing the layer that knows them.

The readers of foreign checkpoints are a layer above this one, so this one must not import them. It knows them
by the name of a module, and imports that when a path holds no Everystep checkpoint.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_RENAMING = "everystep.universal.renaming"
"""Has ``renaming(given)``."""
_CHECKS = "everystep.universal.checking"
"""Has ``check(path, progress, tuning)``."""
_READERS = "everystep.universal.foreign_checkpoint"
"""Has ``recognises``, ``open_foreign``, ``checkpoints_in`` and ``looked_for``."""


def _readers() -> Any:
    return importlib.import_module(_READERS)


def recognises(path: str) -> bool:
    """Whether there is a checkpoint of another system."""
    return bool(_readers().recognises(path))


def open_foreign(path: str, tuning: Any) -> Any:
    """The `Checkpoint` that another system wrote; None if no known system wrote it."""
    readers = _readers()
    return readers.open_foreign(path, tuning) if readers.recognises(path) else None


def check(path: str, progress: Callable[[int], None] | None, tuning: Any) -> Any:
    """The `VerifyReport` of a checkpoint of another system: what can be verified of it."""
    return importlib.import_module(_CHECKS).check(path, progress, tuning)


def checkpoints_in(directory: str) -> list[str]:
    """Names of such checkpoints directly in a directory, sorted."""
    return list(_readers().checkpoints_in(directory))


def looked_for(path: str) -> str:
    """For an error message: what was looked for, and what was found instead."""
    return str(_readers().looked_for(path))


def renaming(given: object) -> Callable[[str], str] | None:
    """The function that `rename=` means; None for None. `SpecError` or `TypeError` if it gives no names."""
    if given is None:
        return None
    found: Callable[[str], str] = importlib.import_module(_RENAMING).renaming(given)
    return found
