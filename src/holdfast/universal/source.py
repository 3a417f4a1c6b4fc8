"""What a foreign checkpoint is to the rest of Holdfast: named leaves that lie in files, and values.

Owns the records only. Where the bytes of a particular system lie is known by its module in `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.format.geometry import Box, boxes_of_range


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements of a box of a leaf (C order) that lie one after another in a file."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class SourceLeaf:
    """An array of a foreign checkpoint, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    copies: tuple[tuple[Stretch, ...], ...] = ()
    terms: tuple[tuple[Stretch, ...], ...] = ()
    reduce: Literal["", "mean", "sum"] = ""
    framework: Literal["torch", "numpy"] = "torch"


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign checkpoint, described."""

    path: str
    kind: str
    step: int
    leaves: tuple[SourceLeaf, ...]
    values: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


def flat_stretches(
    file: str, offset: int, start: int, stop: int, shape: tuple[int, ...], itemsize: int
) -> tuple[Stretch, ...]:
    """The elements `start` to `stop` of a leaf, which lie one after another in a file from `offset` on."""
    found: list[Stretch] = []
    for box in boxes_of_range(shape, start, stop):
        found.append(Stretch(file, offset, box))
        offset += box.volume * itemsize
    return tuple(found)
