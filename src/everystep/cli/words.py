"""Numbers, times and names as people read them. Plain text only; colours and tables are `session`'s."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h"), (math.inf, 86400, "d"))
TIMES = "\N{MULTIPLICATION SIGN}"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def size(nbytes: float) -> str:
    """``1536`` is ``1.5 KiB``; three digits are enough to compare by eye."""
    unit = 0
    while nbytes >= 1024 and unit < len(_BINARY) - 1:
        nbytes /= 1024
        unit += 1
    if unit == 0 or nbytes >= 100:
        return f"{nbytes:.0f} {_BINARY[unit]}"
    return f"{nbytes:.1f} {_BINARY[unit]}"


def speed(nbytes: float, seconds: float) -> str:
    """Decimal gigabytes, as devices are sold."""
    rate = nbytes / seconds / 1e9 if seconds > 0 else math.inf
    return f"{rate:.2f} GB/s" if rate >= 0.095 else f"{rate * 1000:.1f} MB/s"


def age(seconds: float) -> str:
    """How long ago, in its largest unit; nothing if the clock went back."""
    if seconds < 0:
        return "in the future"
    _, divisor, unit = next(row for row in _AGES if seconds < row[0])
    return f"{int(seconds // divisor)} {unit} ago"


def step(number: int | None) -> str:
    """A checkpoint of another system may not state one."""
    return "no step stated" if number is None else f"step {number:,}"


def moment(unix_seconds: float) -> str:
    """Local time. Manifests are validated, but a year that the C library cannot name may still be in one."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:.0f} s after 1970"


def duration(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} \N{MICRO SIGN}s"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 leaf``, ``20,000 leaves``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shape(extents: Sequence[int]) -> str:
    return f"[{', '.join(map(str, extents))}]"


def metrics(found: Mapping[str, float]) -> str:
    return "  ".join(f"{plain(name)} {measured(value)}" for name, value in found.items())


def measured(value: float) -> str:
    """A metric: whole numbers in full, others to five digits."""
    return f"{value:.0f}" if abs(value) < 1e12 and value == int(value) else f"{value:.5g}"


def number(value: float | None) -> str:
    """A difference, short: integers in full while they are short, anything else to three digits."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    return f"{value:.3g}"


def plain(text: str) -> str:
    """`text` without control characters for a terminal: names come from files, and files from anywhere."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + ELLIPSIS
