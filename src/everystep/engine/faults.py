"""Making the system fail on purpose, to prove what happens then. For tests and drills, never on by itself.

A fault is written ``call:nth:action``: the nth call of that kind fails with an errno name (``EIO``,
``ENOSPC``), falls ``short``, is ``slow250`` milliseconds late, or ``kill``s the process; a trailing ``+``
keeps failing from there on. ``any`` counts all kinds together, except for ``start_writeback``, ``ring``,
``probe`` and ``map``, whose number depends on chance. Several are joined by commas:
``EVERYSTEP_FAULTS=sync:3:kill`` in the environment kills at the third sync.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from everystep import _native

CALLS = _native.call_names()


@dataclass(frozen=True, slots=True)
class Fault:
    call: str
    nth: int
    action: str  # "error", "short", "slow" or "kill"
    code: int = 0  # errno of an error, milliseconds of delay
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One recorded call that changed the file system, with the data it carried."""

    call: str
    path: str
    path2: str
    offset: int
    nbytes: int
    data: bytes
    creates: bool


def parse(text: str) -> list[Fault]:
    faults = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            call, nth, action = item.split(":")
            lasting = action.endswith("+")
            action = action.rstrip("+")
            if call not in CALLS and call != "any":
                raise ValueError(f"unknown call {call!r}")
            if action in ("short", "kill"):
                faults.append(Fault(call, int(nth), action, lasting=lasting))
            elif action.startswith("slow"):
                faults.append(Fault(call, int(nth), "slow", int(action[4:]), lasting))
            else:
                faults.append(Fault(call, int(nth), "error", getattr(errno, action), lasting))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"bad fault {item!r} (want call:nth:action): {error}") from error
    return faults


def install(*faults: Fault) -> None:
    """Replaces the faults in force, and sets the counts of calls to 0. No arguments: all off."""
    _native.set_faults([(f.call, f.nth, f.action, f.code, f.lasting) for f in faults])


@contextmanager
def injected(text: str) -> Iterator[None]:
    install(*parse(text))
    try:
        yield
    finally:
        install()


def count_calls() -> int:
    """Calls seen since `install`, which must have been given at least one fault."""
    return _native.calls_seen()


@contextmanager
def traced() -> Iterator[list[TracedCall]]:
    """Records every call that changes the file system into the list it yields, filled when the block ends."""
    events: list[TracedCall] = []
    _native.start_trace()
    try:
        yield events
    finally:
        events.extend(TracedCall(*row) for row in _native.stop_trace())


if _from_environment := os.environ.get("EVERYSTEP_FAULTS"):
    install(*parse(_from_environment))
