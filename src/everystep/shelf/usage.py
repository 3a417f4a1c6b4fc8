"""What a shelf says about itself."""

from __future__ import annotations

from dataclasses import dataclass


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
