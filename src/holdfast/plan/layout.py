"""The layout of one shard: where each leaf lies in the file.

A tensor's address is not ours to choose, but its place in the file is. Large leaves get a file offset
congruent to their address modulo the alignment of direct I/O, so that all but their ragged ends goes from
their own memory to the device without a copy; the gap this may need is an entry of zeros, since safetensors
allows no holes. Small leaves lie packed together before them, widest elements first, so that each is aligned
to its element without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine import ALIGNMENT, Memory, WritePiece
from holdfast.format.dtypes import carrier, itemsize
from holdfast.format.shard import HeaderEntry, build_header, entry_name, pad_name
from holdfast.state import LeafSource

LARGE_NBYTES = 256 << 10
"""From here on a congruent place is worth its gap of up to a block."""
_LINE = 64


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard to be written: its header and the absolute offset of each leaf, in the order of `leaves`."""

    header: bytes
    nbytes: int
    leaves: tuple[LeafSource, ...]
    offsets: tuple[int, ...]

    def pieces(self) -> list[WritePiece]:
        """What the engine writes after the header, in file order."""
        return [
            WritePiece(offset, leaf.source) for leaf, offset in zip(self.leaves, self.offsets, strict=True)
        ]


def plan_shard(groups: Sequence[Sequence[LeafSource]]) -> ShardPlan:
    """Place all leaves in one shard. The order in the file is the order of the result's `leaves`.

    Group follows group: the engine writes a file from its start, so what must leave memory first comes first.
    """
    entries: list[HeaderEntry] = []
    begins: list[int] = []
    at = pads = 0

    def pad_to(target: int) -> None:
        nonlocal at, pads
        if target > at:
            entries.append(HeaderEntry(pad_name(pads), "U8", (target - at,), at, target))
            at = target
            pads += 1

    ordered: list[LeafSource] = []
    for group in groups:
        pad_to(at + -at % _LINE)
        small = [leaf for leaf in group if leaf.nbytes < LARGE_NBYTES]
        small.sort(key=_element_alignment, reverse=True)
        ordered += small
        ordered += [leaf for leaf in group if leaf.nbytes >= LARGE_NBYTES]
        for leaf in ordered[len(begins) :]:
            if leaf.nbytes >= LARGE_NBYTES:
                pad_to(at + _gap(leaf, at))
            stored = carrier(leaf.dtype)
            end = at + leaf.nbytes
            entries.append(
                HeaderEntry(entry_name(leaf.name), stored.name, (*leaf.shape, *stored.tail), at, end)
            )
            begins.append(at)
            at = end
    pad_to(-(-at // ALIGNMENT) * ALIGNMENT)

    torch = any(leaf.framework == "torch" for leaf in ordered)
    # "format" is what Hugging Face's loaders look for.
    header = build_header(entries, {"format": "pt" if torch else "np"})
    start = len(header)
    return ShardPlan(header, start + at, tuple(ordered), tuple(start + begin for begin in begins))


def _element_alignment(leaf: LeafSource) -> int:
    size = itemsize(leaf.dtype)
    return size & -size


def _gap(leaf: LeafSource, at: int) -> int:
    # Data starts at a multiple of the alignment: offsets from there and from the file's start are congruent.
    if isinstance(leaf.source, Memory):
        return int((leaf.source.address - at) % ALIGNMENT)
    return -at % _LINE
