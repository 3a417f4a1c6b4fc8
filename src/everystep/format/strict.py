"""What a JSON decoder does not check by itself: repeated keys, and who is to blame for too deep a nesting.

Also counts values, before any is decoded. Used for manifests and shard headers alike. Knows JSON, not their
contents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from everystep.errors import CorruptCheckpoint

# A string, or brackets in a row. The loop over a string's escapes is unrolled so that it never backtracks.
_BRACKETS_AND_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]+|[\]}]+', re.DOTALL)
# One without an end is matched, too: so each byte is looked at once, whatever the data.
_PLAIN_STRING = re.compile(rb'"[^"]*"?')
_OPENING = frozenset(b"[{")


def reject_duplicate_keys(
    data: bytes | bytearray, canonical: Iterable[bytes | bytearray], where: str
) -> None:
    """`CorruptCheckpoint` when an object in `data` (valid JSON) repeats a key.

    `canonical` is what our encoder makes of the decoded value, piece by piece. It cannot repeat a key, so
    when it equals the data nothing needs to be searched; a file that another writer, or another version of
    the encoder, has formatted differently is searched properly.
    """
    at = 0
    for piece in canonical:
        if not data.startswith(piece, at):
            break
        at += len(piece)
    else:
        if not data[at:].strip(b" \n"):
            return
    try:
        json.loads(data, object_pairs_hook=_unique)
    except ValueError as error:
        raise CorruptCheckpoint(shorten(error), path=where) from None


def _unique(pairs: list[tuple[str, object]]) -> None:
    keys = {key for key, _ in pairs}
    if len(keys) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:80]!r} appears twice in one JSON object")
            seen.add(key)


def reject_deep_nesting(data: bytes | bytearray, max_depth: int, where: str) -> None:
    """`CorruptCheckpoint` when brackets in `data` nest deeper than `max_depth`.

    Called after a decoder ran out of stack, to tell a hostile file from a caller that is itself deep in
    recursion and should see its own `RecursionError`.
    """
    depth = 0
    for match in _BRACKETS_AND_STRINGS.finditer(data):
        first = data[match.start()]
        if first in _OPENING:
            depth += match.end() - match.start()
            if depth > max_depth:
                raise CorruptCheckpoint(f"JSON nested deeper than {max_depth} levels", path=where)
        elif first != ord('"'):
            depth -= match.end() - match.start()


def more_values_than(limit: int, data: bytes | bytearray) -> bool:
    """Whether `data` has more JSON values. Each is preceded by a comma or an opening bracket.

    Those inside of strings do not count, but only if there are many does it look at the strings.
    """
    if len(data) <= limit or _count_openings(data, 0, len(data)) <= limit:
        return False
    # Without escapes strings are simple to find. A pattern that knew them would take memory for each escape.
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    count = _count_openings(plain, 0, len(plain))
    for number, match in enumerate(_PLAIN_STRING.finditer(plain)):
        # Each string is a value, or the key of one.
        if count <= limit or number > 2 * limit:
            break
        count -= _count_openings(plain, match.start(), match.end())
    return count > limit


def _count_openings(data: bytes | bytearray, start: int, end: int) -> int:
    return data.count(b",", start, end) + data.count(b"[", start, end) + data.count(b"{", start, end)


def shorten(text: object, limit: int = 200) -> str:
    """Text for an error message, bounded however long a hostile file made it."""
    message = str(text)
    return message if len(message) <= limit else message[:limit] + "..."
