"""What a JSON decoder does not check by itself: repeated keys, and who is to blame for too deep a nesting.

Used for manifests and shard headers alike. Knows JSON, not their contents.
"""

from __future__ import annotations

import json
import re

from holdfast.errors import CorruptCheckpoint

# A string, or brackets in a row. The loop over a string's escapes is unrolled so that it never backtracks.
_BRACKETS_AND_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]+|[\]}]+', re.DOTALL)
_OPENING = frozenset(b"[{")


def reject_duplicate_keys(data: bytes, canonical: bytes | bytearray, where: str) -> None:
    """`CorruptCheckpoint` when an object in `data` (valid JSON) repeats a key.

    `canonical` is what our encoder makes of the decoded value. It cannot repeat a key, so when it equals the
    data nothing needs to be searched; a file that another writer, or another version of the encoder, has
    formatted differently is searched properly.
    """
    if data.startswith(canonical) and not data[len(canonical) :].strip(b" \n"):
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


def reject_deep_nesting(data: bytes, max_depth: int, where: str) -> None:
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


def shorten(text: object, limit: int = 200) -> str:
    """Text for an error message, bounded however long a hostile file made it."""
    message = str(text)
    return message if len(message) <= limit else message[:limit] + "..."
