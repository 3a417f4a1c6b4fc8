"""How the files of an open checkpoint are reached: what `parts` and `shard_reader` need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class FileAccess(Protocol):
    """The files of one checkpoint, open until `close`.

    `ReaderLock` holds the directory of an Everystep checkpoint. The files of a foreign one can be anywhere.
    """

    @property
    def path(self) -> str:
        """The path to name the checkpoint by."""

    @property
    def directory(self) -> str:
        """The directory to open files in."""

    def file(self, name: str) -> str:
        """The path to open a file by."""

    def pin(self, names: Iterable[str]) -> bool:
        """Keeps these files within reach even when they are removed. Returns whether all were there."""

    def require_current(self) -> None:
        """Raises if the checkpoint was replaced or removed since it was opened."""

    def close(self) -> None:
        """Closes all files. Later reads fail."""
