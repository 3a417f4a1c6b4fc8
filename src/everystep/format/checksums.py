"""Checksums as text: XXH3-64, sixteen lowercase hexadecimal digits, one per chunk of a fragment.

Owns how checksums are written down and counted. Computing them over tensors, beside the device's own work,
is the engine's part.
"""

from __future__ import annotations

import re

from everystep.engine import xxh3_64

HEX_DIGITS = 16

_LOWER_HEX = re.compile(r"[0-9a-f]*")


def digest(data: bytes | bytearray | memoryview) -> str:
    """XXH3-64 (seed 0) of `data` as sixteen hexadecimal digits."""
    return f"{xxh3_64(memoryview(data)):016x}"


def chunk_count(nbytes: int, chunk_nbytes: int) -> int:
    """How many checksums cover `nbytes` bytes; the last chunk may be shorter, no bytes need none."""
    return -(-nbytes // chunk_nbytes)


def is_hex(text: str) -> bool:
    """Whether `text` is lowercase hexadecimal digits and nothing else."""
    return _LOWER_HEX.fullmatch(text) is not None
