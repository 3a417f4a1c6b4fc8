"""What the ranks of a measured world are told, and what they answer: one JSON message per line.

Times are readings of the monotonic clock, which all processes of a machine share: an operation of several
ranks lasts from the first one's beginning to the last one's end.
"""

from __future__ import annotations

import msgspec


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Get a system ready: imports, and what is set up once. `directory` is its own."""

    system: str
    directory: str


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Save durably at `path`, which does not exist yet."""

    system: str
    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load what was saved at `path` into the state; `verify` that it is what was built."""

    system: str
    path: str
    verify: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let go of everything and end."""


Order = Prepare | Save | Load | Stop


class Did(msgspec.Struct, frozen=True, tag="did"):
    """Done: when it began and ended on this rank; where it was saved, if not where it was told to.

    `seconds`, where the system read a clock of its own.
    """

    began: float
    ended: float
    path: str | None = None
    seconds: float | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Not done."""

    reason: str


Answer = Did | Failed
