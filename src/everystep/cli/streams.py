"""Characters that the output's encoding lacks: our own in ASCII (``us`` for microseconds), others escaped."""

from __future__ import annotations

import codecs
import os
import sys

_HANDLER = "everystep-ascii"
_ASCII = {
    "\N{MICRO SIGN}": "u",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{GREATER-THAN OR EQUAL TO}": ">=",
    "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{EN DASH}": "-",
    "\N{MIDDLE DOT}": ".",
    "\N{BULLET}": "*",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
}


def prepare_streams() -> None:
    """Makes the output replace characters that its encoding lacks."""
    codecs.register_error(_HANDLER, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        if _wants_ascii():
            reconfigure(encoding="ascii")
        reconfigure(errors=_HANDLER)


def _wants_ascii() -> bool:
    """Whether the user set the C locale, for which Python would write UTF-8."""
    given = "PYTHONUTF8" in os.environ or "PYTHONIOENCODING" in os.environ
    return os.environ.get("LC_ALL") in ("C", "POSIX") and not given


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    if first in _ASCII:
        return _ASCII[first], error.start + 1
    one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    return codecs.backslashreplace_errors(one)
