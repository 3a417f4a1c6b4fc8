"""How an error becomes a report: its type, one clear message, and an exit code."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from everystep.errors import EverystepError

PROBLEM = 1
"""A problem was found, or the command failed."""
INTERRUPTED = 130
BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """`details`: the file (``path``) and the leaf that the error names."""

    type: str
    message: str
    details: dict[str, str] = field(default_factory=dict)
    exit_code: int = PROBLEM


def report_of(error: EverystepError | OSError) -> ErrorReport:
    """The report of any error that a user can cause."""
    found = {name: getattr(error, name, None) for name in ("path", "leaf")}
    details = {name: value for name, value in found.items() if value is not None}
    return ErrorReport(type(error).__name__, _message(error), details)


def _message(error: EverystepError | OSError) -> str:
    if isinstance(error, EverystepError) or not error.strerror:
        return str(error)
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    return where + error.strerror
