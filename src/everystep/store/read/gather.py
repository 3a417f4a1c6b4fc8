"""Reading boxes of leaves from the files that hold them.

A range of a fragment that goes to one place, in one piece, is read straight to it. Anything else is read a
window of the engine's at a time, rounded out to checksums, and each window is scattered to the places that
need some of it: memory stays bounded by the windows, however large the leaf.

Files on different volumes are read at the same time, up to a few, files of one volume one after the other.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everystep.engine import Consumed, Destination, Unkept
from everystep.engine.threads import Background
from everystep.errors import CorruptCheckpoint
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box, contiguous_runs, whole
from everystep.format.records import Fragment, Part
from everystep.plan import ByteRange
from everystep.plan.fragments import part_of_destination
from everystep.plan.placement import LocalBox
from everystep.plan.resharding import Copy, ReadPlan, Stored, StoredIndex, Wanted, plan_reads
from everystep.state import LeafMeta
from everystep.store.read.requests import BoxRequest
from everystep.store.read.scatter import Receiver, Scatter
from everystep.store.read.shard_reader import FragmentRequest, ShardReader, request_range

Progress = Callable[[int], None]

_MOST_VOLUMES = 8
"""Read at the same time: each takes memory for its windows, and ranks may have had one each."""


@dataclass(frozen=True, slots=True)
class FileReads:
    """What is read out of one file of a rank's part."""

    rank: int
    file: int
    volume: str | None
    requests: tuple[FragmentRequest, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.piece.destination.nbytes for item in self.requests)


def plan_fetch(
    parts: Sequence[Part],
    wanted: Sequence[BoxRequest],
    metas: Mapping[str, LeafMeta],
    where: str,
    *,
    verify: bool,
) -> list[FileReads]:
    """The reads that fill everything wanted. Raises `CorruptCheckpoint` if some elements are in no file."""
    index = _Index(parts, metas, where)
    plan = index.plan(wanted)
    by_fragment: dict[Stored, list[Copy]] = {}
    for read in plan.reads:
        for copy in read.copies:
            by_fragment.setdefault(copy.source, []).append(copy)
    in_files: dict[tuple[int, int], list[FragmentRequest]] = {}
    for stored, copies in by_fragment.items():
        requests = _requests(index, stored, copies, wanted, verify=verify)
        in_files.setdefault((stored.part, stored.file), []).extend(requests)
    by_rank = {part.rank: part for part in parts}
    return [
        FileReads(rank, file, by_rank[rank].files[file].volume, tuple(requests))
        for (rank, file), requests in sorted(in_files.items())
    ]


def fetch(
    reads: Sequence[FileReads],
    reader: Callable[[int], ShardReader],
    *,
    verify: bool,
    progress: Progress | None = None,
) -> None:
    """Carries them out. The first problem, by volume and file, is raised once all volumes have ended."""
    volumes: dict[str | None, list[FileReads]] = {}
    for read in reads:
        volumes.setdefault(read.volume, []).append(read)
    sum_up = None if progress is None else _Sum(progress)

    def read_volume(queue: Sequence[FileReads]) -> None:
        for item in queue:
            advance = None if sum_up is None else sum_up.of((item.rank, item.file))
            problems = reader(item.rank).file_problems(
                item.file, item.requests, verify=verify, whole=False, progress=advance
            )
            for problem in problems:
                raise problem.error()
            if advance is not None:
                advance(item.nbytes)

    if len(volumes) <= 1:
        for queue in volumes.values():
            read_volume(queue)
        return
    left = deque(enumerate(volumes.values()))
    failures: dict[int, BaseException] = {}

    def read_volumes() -> None:
        while left:
            try:
                number, queue = left.popleft()
            except IndexError:
                return  # another thread took the last one
            try:
                read_volume(queue)
            except BaseException as error:
                failures[number] = error

    under_way: list[Background[None]] = []
    try:
        for _ in range(min(len(volumes), _MOST_VOLUMES)):
            under_way.append(Background(read_volumes, "everystep-volume"))
        for job in under_way:
            job.result()
    except BaseException:
        left.clear()  # the destinations may be freed or changed once this is raised
        for job in under_way:
            job.wait()
        raise
    for _, error in sorted(failures.items()):
        raise error


class _Index:
    """The fragments of some parts, to be found by leaf and box, and by place."""

    def __init__(self, parts: Sequence[Part], metas: Mapping[str, LeafMeta], where: str) -> None:
        self._where = where
        self._parts = {part.rank: part for part in parts}
        self._metas = metas
        try:
            self._stored = StoredIndex(parts)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(error.reason, path=where, leaf=error.leaf) from None

    def plan(self, wanted: Sequence[BoxRequest]) -> ReadPlan:
        pieces = [
            Wanted(want.leaf, LocalBox(want.box, whole(want.box.shape), want.box.shape)) for want in wanted
        ]
        try:
            plan = plan_reads(self._stored, pieces)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(error.reason, path=self._where, leaf=error.leaf) from None
        for missing in plan.missing:
            raise CorruptCheckpoint(
                f"no rank has stored the elements {_brief(missing.box)}", path=self._where, leaf=missing.leaf
            )
        return plan

    def chunk_nbytes(self, stored: Stored) -> int:
        return self._parts[stored.part].chunk_nbytes

    def fragment(self, stored: Stored) -> tuple[str, Fragment]:
        """The record of a fragment, and its leaf."""
        return self._fragments[stored.part, stored.file, stored.offset]

    @functools.cached_property
    def _fragments(self) -> dict[tuple[int, int, int], tuple[str, Fragment]]:
        return {
            (rank, fragment.file, fragment.offset): (leaf.name, fragment)
            for rank, part in self._parts.items()
            for leaf in part.leaves
            for fragment in leaf.fragments
            if fragment.nbytes
        }

    def size(self, leaf: str) -> int:
        return itemsize(self._metas[leaf].dtype)


def _requests(
    index: _Index, stored: Stored, copies: Sequence[Copy], wanted: Sequence[BoxRequest], *, verify: bool
) -> list[FragmentRequest]:
    """The reads of one fragment, for all requests that need some of it."""
    leaf, fragment = index.fragment(stored)
    size, chunk = index.size(leaf), index.chunk_nbytes(stored)
    ranges = []
    for copy in copies:
        start, stop = (at - stored.offset for at in copy.source_range(size))
        span = ByteRange(start, stop)
        ranges.append((span.rounded_out(chunk, fragment.nbytes) if verify else span, span, copy))
    ranges.sort(key=lambda item: item[0].start)
    requests: list[FragmentRequest] = []
    group: list[Copy] = []
    outer = inner = ByteRange(0, 0)
    for outside, inside, copy in ranges:
        if group and outside.start < outer.stop:
            outer = inner = ByteRange(outer.start, max(outer.stop, outside.stop))
        else:
            if group:
                place = _place(stored.box, size, outer, inner, group, wanted)
                requests.append(request_range(leaf, fragment, outer, chunk, place))
            group, outer, inner = [], outside, inside
        group.append(copy)
    place = _place(stored.box, size, outer, inner, group, wanted)
    requests.append(request_range(leaf, fragment, outer, chunk, place))
    return requests


def _place(
    box: Box,
    size: int,
    outer: ByteRange,
    inner: ByteRange,
    copies: Sequence[Copy],
    wanted: Sequence[BoxRequest],
) -> Destination | Unkept:
    """Where the bytes `outer` of a fragment go: straight to their only destination, or scattered."""
    if len(copies) == 1 and outer == inner and contiguous_runs(copies[0].target.box, box).number <= 1:
        want, local = wanted[copies[0].wanted], copies[0].target.local
        if isinstance(want.destination, Unkept):
            return Unkept(outer.nbytes)
        return part_of_destination(want.destination, want.box.shape, size, local)
    receivers = [
        Receiver.of(copy.target.box, box, size, want.box.shape, copy.target.local, want.destination)
        for copy in copies
        if not isinstance((want := wanted[copy.wanted]).destination, Unkept)
    ]
    if not receivers:
        return Unkept(outer.nbytes)
    return Consumed(outer.nbytes, Scatter(box.shape, size, outer.start, receivers))


class _Sum:
    """Progress of several files as one number."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def of(self, key: tuple[int, int]) -> Progress:
        def advance(nbytes: int) -> None:
            with self._lock:
                self._done[key] = nbytes
                self._progress(sum(self._done.values()))

        return advance


def _brief(box: Box) -> str:
    spans = ", ".join(f"{start}:{stop}" for start, stop in zip(box.start[:8], box.stop, strict=False))
    return f"[{spans}{', ...' if len(box.start) > 8 else ''}]"
