"""What a shelf may take, as people write it, and what it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
LEAST_NBYTES = 64 << 10
MOST_NBYTES = 1 << 47
"""A root with a larger limit is one that no reader believes (native/src/shelf_format.hpp)."""


def to_nbytes(size: int | str) -> int:
    """Bytes of a size such as 65536, "64MiB" or "1.5 GB".

    >>> to_nbytes("64MiB")
    67108864
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"a size is a number of bytes or text such as '64MiB', not {type(size).__name__}")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"cannot read the size {size!r}: write it as '64MiB' or '1GB'")
        size = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if size > MOST_NBYTES:
        raise ValueError(f"a shelf can have at most {MOST_NBYTES} bytes (128 TiB), not {size}")
    if size < LEAST_NBYTES:
        raise ValueError(f"a shelf needs at least {LEAST_NBYTES} bytes, not {size}")
    return size


class ShelfWarning(UserWarning):
    """The newest commit of a shelf was not complete or is damaged, so the one before it is used."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a shelf. `used`: the committed state; `waiting`: replaced, but readers still use it.

    `file` is the size of the file now, `limit` what it may grow to. `generation` counts the commits.
    """

    entries: int
    used: int
    file: int
    limit: int
    waiting: int
    generation: int
