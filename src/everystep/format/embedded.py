"""A checkpoint that is one file: the root manifest inside of its shard's header.

Owns the place of the manifest there (the text ``everystep`` of the header's metadata), the one digest that
covers the whole header, and the circle between the two: offsets in the manifest depend on the header's size,
which depends on the manifest's. The records themselves are `everystep.format.manifest`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.format.checksums import HEX_DIGITS, digest
from everystep.format.manifest import decode_text, encode_text, shard_name
from everystep.format.records import EMBEDDED, Root
from everystep.format.shard import (
    ALIGNMENT,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    EntryTable,
    encode_header,
    header_nbytes,
    parse_header,
    parse_metadata,
)

EMBEDDING_SHARD: Final = shard_name(0, 0)
"""The only file of such a checkpoint."""

_KEY = "everystep"
# Up to the digest every such file is the same, but for the length: so its place is known before any parsing.
_OPENING = b'{"__metadata__":{"everystep":"{\\"xxh3\\":\\"'
_DIGITS = slice(LENGTH_NBYTES + len(_OPENING), LENGTH_NBYTES + len(_OPENING) + HEX_DIGITS)
PEEK_NBYTES: Final = _DIGITS.stop
"""Enough of a file to tell whether a manifest is in it."""
_ZEROS = b"0" * HEX_DIGITS


def embed_root(
    describe: Callable[[int], Root],
    table: EntryTable,
    metadata: Mapping[str, str],
    limit_nbytes: int,
) -> bytes | None:
    """The header of a one-file checkpoint; None when it takes more than so many bytes, or is unwieldy.

    `describe` makes the manifest for a header of so many bytes.
    """
    limit_nbytes = min(limit_nbytes, MAX_HEADER_NBYTES // 8)  # a text takes more bytes than characters
    # Most often right at once, with names standing there four times; room that is left over is padding.
    nbytes = -(-(700 + 280 * len(table) + 4 * sum(map(len, table))) // ALIGNMENT) * ALIGNMENT
    while nbytes <= limit_nbytes:
        text = encode_text(describe(nbytes))
        if len(text) > limit_nbytes:
            break
        header = encode_header(table, {_KEY: text, **metadata}, nbytes)
        if len(header) == nbytes:
            return seal(header)
        nbytes = len(header)
    return None


def seal(header: bytes) -> bytes:
    """Puts the digest into its place, which holds zeros until then."""
    return header[: _DIGITS.start] + digest(header).encode() + header[_DIGITS.stop :]


def embeds_root(beginning: bytes) -> bool:
    """Whether a file that begins so is a checkpoint by itself."""
    return beginning[LENGTH_NBYTES : _DIGITS.start] == _OPENING


def extract_root(header: bytes, file_nbytes: int, where: str) -> Root:
    """Check and decode the manifest in the header that a file of `file_nbytes` begins with.

    `header` may go on beyond it. Digest first, then syntax, as for a manifest by itself.
    """
    check_header(header, file_nbytes, where)
    text = parse_metadata(header, file_nbytes, where)[_KEY]
    root = decode_text(text, where)
    part = root.part
    alone = root.world == 1 and not root.parts and len(part.files) == 1
    if not alone or part.files[0].name != EMBEDDING_SHARD or part.files[0].header_xxh3 != EMBEDDED:
        raise CorruptCheckpoint("the manifest in this file is not of a checkpoint of one file", path=where)
    if part.files[0].header_nbytes != header_nbytes(header, file_nbytes, where):
        raise CorruptCheckpoint("the manifest in this file is of another header", path=where)
    return root


def check_header(header: bytes, file_nbytes: int, where: str) -> None:
    """`CorruptCheckpoint` unless every byte of the header is as it was written."""
    if not embeds_root(header):
        parse_header(header, file_nbytes, where)  # when that is damaged, it says more
        raise IncompleteCheckpoint("there is no manifest, neither by itself nor in this file", path=where)
    nbytes = header_nbytes(header, file_nbytes, where)
    zeroed = bytearray(header[:nbytes])
    zeroed[_DIGITS] = _ZEROS
    if digest(zeroed).encode() != header[_DIGITS]:
        raise CorruptCheckpoint(
            "digest does not match: the header's bytes are not those that were written", path=where
        )
