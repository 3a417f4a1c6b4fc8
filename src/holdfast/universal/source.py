"""What a foreign checkpoint is to its readers: leaves, each a set of boxes in files, and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.format.geometry import Box


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements of a box of a leaf (C order) that lie one after another in a file."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class SourceLeaf:
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
    path: str
    kind: str
    step: int
    leaves: tuple[SourceLeaf, ...]
    values: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
