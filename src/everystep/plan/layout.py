"""The layout of one shard: where each leaf lies in the file, and which bytes of a leaf a request needs.

A tensor's address is not ours to choose, but its place in the file is. Large leaves get a file offset
congruent to their address modulo the alignment of direct I/O, so that a load can read all but their ragged
ends straight into memory that has the same residue; the gap this may need is an entry of zeros, since
safetensors allows no holes. Small leaves lie packed together before them, widest elements first, so that
each is aligned to its element without gaps.

A request is a range along the first dimensions. Checksums are per chunk, so what is read is rounded out to
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from everystep.engine import ALIGNMENT, Memory, WritePiece
from everystep.format.dtypes import carrier, itemsize
from everystep.format.shard import (
    EntryTable,
    HeaderEntry,
    encode_header,
    entry_name,
    entry_table,
    pad_name,
)
from everystep.state import LeafSource

LARGE_NBYTES = 256 << 10
"""From here on a congruent place is worth its gap of up to a block."""
_LINE = 64


class ShardLayout(Struct, frozen=True):
    """The data of a shard: where each leaf begins in it, in the order of `leaves`.

    `table` and `metadata` are what its header says; the table also has what fills the gaps.
    """

    table: EntryTable
    metadata: dict[str, str]
    nbytes: int
    leaves: tuple[LeafSource, ...]
    begins: tuple[int, ...]

    def pieces(self) -> list[WritePiece]:
        """What goes where, counted from the start of the data."""
        return [WritePiece(begin, leaf.source) for leaf, begin in zip(self.leaves, self.begins, strict=True)]

    def plan(self) -> ShardPlan:
        """The plan with a header that says only what is where."""
        return self.behind(encode_header(self.table, self.metadata))

    def behind(self, header: bytes) -> ShardPlan:
        start = len(header)
        offsets = tuple([start + begin for begin in self.begins])
        return ShardPlan(header, start + self.nbytes, self.leaves, offsets)


class ShardPlan(Struct, frozen=True):
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
    """Place all leaves in one shard, behind a header that says where they are."""
    return arrange(groups).plan()


def arrange(groups: Sequence[Sequence[LeafSource]]) -> ShardLayout:
    """Give all leaves their place in one shard. Their order there is that of the result's `leaves`.

    Group follows group: the engine writes a file from its start, so what must leave memory first comes first.
    """
    signature = _signature(groups)
    if signature is None:
        return _arrange(groups)
    known = _known.get(signature)
    if known is None:
        layout = _arrange(groups)
        index = {id(leaf): number for number, leaf in enumerate(leaf for group in groups for leaf in group)}
        while len(_known) >= _MAX_KNOWN:
            _known.pop(next(iter(_known)), None)
        # Without the leaves: those of another save have other memory, and this must not keep any alive.
        _known[signature] = replace(layout, leaves=()), tuple([index[id(leaf)] for leaf in layout.leaves])
        return layout
    layout, order = known
    leaves = [leaf for group in groups for leaf in group]
    return ShardLayout(
        layout.table, layout.metadata, layout.nbytes, tuple([leaves[i] for i in order]), layout.begins
    )


_Signature = tuple[tuple[tuple[str, str, tuple[int, ...], str, int], ...], ...]
_MAX_KNOWN = 16
_FEW = 256
# A training saves the same few leaves over and over, and where latency counts, arranging them does too.
_known: dict[_Signature, tuple[ShardLayout, tuple[int, ...]]] = {}


def _signature(groups: Sequence[Sequence[LeafSource]]) -> _Signature | None:
    """Everything that the places of leaves depend on. None for many leaves, and if addresses matter, too."""
    if sum(map(len, groups)) > _FEW:
        return None
    found = []
    for group in groups:
        leaves = []
        for leaf in group:
            if leaf.source.nbytes >= LARGE_NBYTES:
                return None
            index = 0 if leaf.fragment is None else leaf.fragment.index
            leaves.append((leaf.name, leaf.dtype, leaf.shape, leaf.framework, index))
        found.append(tuple(leaves))
    return tuple(found)


def _arrange(groups: Sequence[Sequence[LeafSource]]) -> ShardLayout:
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
                HeaderEntry(
                    entry_name(leaf.name, _index(leaf)), stored.name, (*leaf.shape, *stored.tail), at, end
                )
            )
            begins.append(at)
            at = end
    pad_to(-(-at // ALIGNMENT) * ALIGNMENT)
    torch = any(leaf.framework == "torch" for leaf in ordered)
    # "format" is what Hugging Face's loaders look for.
    metadata = {"format": "pt" if torch else "np"}
    return ShardLayout(entry_table(entries), metadata, at, tuple(ordered), tuple(begins))


def _index(leaf: LeafSource) -> int:
    return 0 if leaf.fragment is None else leaf.fragment.index


def _element_alignment(leaf: LeafSource) -> int:
    size = itemsize(leaf.dtype)
    return size & -size


def _gap(leaf: LeafSource, at: int) -> int:
    # Data starts at a multiple of the alignment: offsets from there and from the file's start are congruent.
    if isinstance(leaf.source, Memory):
        return int((leaf.source.address - at) % ALIGNMENT)
    return -at % _LINE


@dataclass(frozen=True, slots=True)
class ByteRange:
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def rounded_out(self, chunk_nbytes: int, limit: int) -> ByteRange:
        """The smallest range of whole chunks around this one; the last chunk ends at `limit`."""
        start = self.start // chunk_nbytes * chunk_nbytes
        return ByteRange(start, min(-(-self.stop // chunk_nbytes) * chunk_nbytes, limit))


def rows_to_read(
    shape: Sequence[int], box: Sequence[range], itemsize: int, coarse_nbytes: int
) -> Iterator[tuple[tuple[int, ...], ByteRange]]:
    """Cuts a box of a C-order array into byte ranges, each with the index prefix of the rows it holds.

    Yields ``(prefix, bytes)``: the bytes cover ``array[prefix][box[k].start:box[k].stop]`` in full rows,
    ``k`` being the prefix's length. It goes into a dimension only where its rows are larger than
    `coarse_nbytes`, since reading a little too much is cheaper than many small reads.
    """
    yield from _descend((), 0, shape, box, itemsize, coarse_nbytes)


def _descend(
    prefix: tuple[int, ...], base: int, shape: Sequence[int], box: Sequence[range], itemsize: int, coarse: int
) -> Iterator[tuple[tuple[int, ...], ByteRange]]:
    depth = len(prefix)
    if depth == len(shape):
        yield prefix, ByteRange(base, base + itemsize)
        return
    row = itemsize * math.prod(shape[depth + 1 :])
    wanted = box[depth]
    narrower = any(len(span) < size for span, size in zip(box[depth + 1 :], shape[depth + 1 :], strict=True))
    if narrower and row > coarse:
        for index in wanted:
            yield from _descend((*prefix, index), base + index * row, shape, box, itemsize, coarse)
    else:
        yield prefix, ByteRange(base + wanted.start * row, base + wanted.stop * row)
