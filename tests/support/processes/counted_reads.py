"""What a process reads from storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everystep import engine


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The sizes of all reads of leaves in this process, while the block lasts."""
    sizes: list[int] = []
    real = engine.read

    def read(path: Any, pieces: Any, **options: Any) -> Any:
        sizes.append(pieces.nbytes)
        return real(path, pieces, **options)

    engine.read = read
    try:
        yield sizes
    finally:
        engine.read = real
