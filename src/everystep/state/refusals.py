"""What a state cannot hold, in words: the errors of everything that takes values, and the names of types."""

from __future__ import annotations

from everystep.errors import UnsupportedState


def unsupported(place: str, reason: str) -> UnsupportedState:
    where = f"at {place!r}" if place else "at the top of the state"
    return UnsupportedState(f"cannot store the value {where}: {reason}")


def unfillable(place: str, reason: str) -> UnsupportedState:
    """As `unsupported`, for a target: what cannot be saved cannot be filled either."""
    where = f"at {place!r}" if place else "of the load"
    return UnsupportedState(f"cannot restore into the target {where}: {reason}")


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
