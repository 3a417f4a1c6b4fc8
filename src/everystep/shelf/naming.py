"""Which names an entry can have, and which of them work as attributes."""

from __future__ import annotations

MAX_NAME_NBYTES = 1024


def to_key(name: str) -> bytes:
    if type(name) is not str:
        raise TypeError(f"the names of a shelf are text, not {type(name).__name__}")
    try:
        key = name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} cannot be a name: it is not text") from None
    if not 0 < len(key) <= MAX_NAME_NBYTES:
        raise ValueError(f"a name has 1 to {MAX_NAME_NBYTES} bytes, not {len(key)}")
    return key


def require_attribute(name: str, reserved: frozenset[str]) -> None:
    if name.startswith("_") or name in reserved:
        raise AttributeError(f"{name!r} is not a name for attribute access: use shelf[{name!r}]")
