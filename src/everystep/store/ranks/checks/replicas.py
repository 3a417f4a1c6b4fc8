"""Whether ranks that should hold equal copies of arrays do. `values` compares plain values.

Each holder writes a share of the replicated arrays. If the copies differed, the stored array would equal none
of them. So ranks compare digests of them. One small message per rank says whether all copies are equal. Only
if they are not, the ranks concerned send the digests of single leaves, and all ranks raise the same error.

Hashing all bytes takes time, so it happens only when ranks make a plan. Copies may diverge later (statistics
that every rank collects for itself), so every save compares a sample.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from everystep.engine import ByteSource, Memory, Produced, WritePiece, copy, fingerprints, xxh3_64
from everystep.engine.buffers import view
from everystep.errors import RanksDisagree
from everystep.format.checksums import digest
from everystep.format.geometry import boxes_of_range
from everystep.plan.fragments import part_of_source
from everystep.plan.placement import LeafLayout
from everystep.plan.replica_groups import ReplicaGroup, replica_groups_of
from everystep.state import LeafSource
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.membership import name_ranks

WINDOW_NBYTES = 8 << 20
"""Larger arrays are hashed window by window: what is not in one row in host memory needs a buffer."""

_MAX_STREAMS = 8
_MAX_LEAVES = 8
_MAX_RANKS = 8
_MAX_SAMPLES = 32


class _StreamDigest(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank has of a stream: which one (see `everystep.plan.replica_groups`), and a digest."""

    replica_group: int
    stream: int
    digest: int


class _LeafDigests(msgspec.Struct, frozen=True, array_like=True):
    """The digests of a stream's leaves in the order of the replica group's members, 8 bytes each."""

    replica_group: int
    stream: int
    digests: bytes


class _Finding(msgspec.Struct, frozen=True, array_like=True):
    """A leaf of which ranks hold different copies: sets of ranks whose copies are equal."""

    leaf: str
    sets: list[list[int]]


def check_replicas(
    meeting: Meeting,
    leaves: Sequence[LeafSource],
    layouts: Sequence[LeafLayout],
) -> None:
    """Compare what several ranks hold copies of; `RanksDisagree`, on all ranks, names what is not equal.

    To be called by all ranks, each with its own leaves and with the layouts of all. Hashes every byte of this
    rank's copies: as long as the copies do not change meanwhile, equal digests mean equal bits.
    """
    replica_groups = replica_groups_of(layouts)
    here = {leaf.name: leaf for leaf in leaves}
    mine = list(_hashed(meeting.rank, here, layouts, replica_groups))
    sums = [_StreamDigest(item.replica_group, item.stream, xxh3_64(item.digests)) for item in mine]

    def compare(messages: Sequence[bytes]) -> bytes:
        return msgspec.msgpack.encode(_unequal_streams(messages))

    verdict = meeting.agree(msgspec.msgpack.encode(sums), compare)
    suspects = msgspec.msgpack.decode(verdict, type=list[tuple[int, int]])
    if not suspects:
        return
    details = [item for item in mine if (item.replica_group, item.stream) in suspects]

    def find(messages: Sequence[bytes]) -> bytes:
        return msgspec.msgpack.encode(_unequal_leaves(messages, layouts, replica_groups))

    report = meeting.agree(msgspec.msgpack.encode(details), find)
    raise _disagreement(msgspec.msgpack.decode(report, type=list[_Finding]))


def _hashed(
    rank: int,
    here: Mapping[str, LeafSource],
    layouts: Sequence[LeafLayout],
    replica_groups: Sequence[ReplicaGroup],
) -> Iterator[_LeafDigests]:
    buffer = np.empty(0, np.uint8)
    for number, replica_group in enumerate(replica_groups):
        coordinate = replica_group.mesh.coordinate(rank)
        if replica_group.copies < 2 or coordinate is None:
            continue
        digests: list[int] = []
        for leaf, _ in replica_group.members:
            found = here.get(layouts[leaf].name)
            if found is not None and not isinstance(found.source, Memory) and not buffer.nbytes:
                buffer = np.empty(WINDOW_NBYTES, np.uint8)
            digests.append(0 if found is None else array_digest(found, buffer))
        stream = replica_group.stream_number(dict(enumerate(coordinate)))
        yield _LeafDigests(number, stream, struct.pack(f"<{len(digests)}Q", *digests))


Copies = tuple[tuple[str, tuple[str, ...]], ...]
"""What a rank holds that others hold, too: streams (`everystep.plan.replica_groups`), and their leaves."""


def copies_of(rank: int, layouts: Sequence[LeafLayout]) -> Copies:
    """What this rank and others hold copies of. The streams of all ranks have the same names."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for number, replica_group in enumerate(replica_groups_of(layouts)):
        coordinate = replica_group.mesh.coordinate(rank)
        if replica_group.copies > 1 and coordinate is not None:
            stream = replica_group.stream_number(dict(enumerate(coordinate)))
            found.append(
                (f"{number}.{stream}", tuple(layouts[leaf].name for leaf, _ in replica_group.members))
            )
    return tuple(found[:_MAX_SAMPLES])


def samples(copies: Copies, here: Mapping[str, LeafSource]) -> dict[str, str]:
    """Digests over samples of this rank's copies, by stream: equal where the copies are.

    At next to no cost, so only of what is in host memory, however it lies there. Of which leaves that is
    belongs to the name, so samples of different arrays are never compared.
    """
    found: dict[str, str] = {}
    for stream, names in copies:
        near: list[str] = []
        sources: list[ByteSource] = []
        for name in names:
            source = here[name].source if name in here else None
            if source is not None and in_host_memory(source):
                near.append(name)
                sources.append(source)
        if sources:
            sampled = struct.pack(f"<{len(sources)}Q", *fingerprints(sources))
            found[f"{stream}/{digest(chr(0).join(near).encode())}"] = digest(sampled)
    return found


def in_host_memory(source: ByteSource) -> bool:
    """Whether a few of its bytes can be had at next to no cost."""
    return not isinstance(source, Produced) or bool(getattr(source.owner, "is_cpu", False))


def check_samples(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """`RanksDisagree` when samples of copies differ."""
    first: dict[str, tuple[int, str]] = {}
    for rank, sampled in sorted(by_rank.items()):
        for stream, its in sampled.items():
            other, known = first.setdefault(stream, (rank, its))
            if known != its:
                raise RanksDisagree(
                    f"ranks {other} and {rank} hold different values of replicated arrays; the save was "
                    "rejected. The next save, or Checkpointer.check_replicas(), names them. Mark state that "
                    "is meant to differ with everystep.per_rank; make everything else equal",
                    ranks=(other, rank),
                )


def check_ties(
    meeting: Meeting,
    aliases: Sequence[tuple[str, str]],
    layouts: Sequence[LeafLayout],
) -> None:
    """`RanksDisagree` unless names that share one array (tied weights) do so on every rank that has them.

    To be called by all ranks, each with its own aliases and with the layouts of all.
    """
    leaves = {layout.name for layout in layouts}
    first: dict[str, tuple[int, str]] = {}
    for blob, ranks in meeting.exchange(msgspec.msgpack.encode(sorted(aliases))).items():
        for name, of in msgspec.msgpack.decode(blob, type=list[tuple[str, str]]):
            other, known = first.setdefault(name, (ranks[0], of))
            if known == of and name not in leaves:
                continue
            there = "a separate array" if known == of else f"tied to {known}"
            whose = "another rank" if known == of else f"rank {other}"
            raise RanksDisagree(
                f"{name} is tied to {of} on {name_ranks(ranks)}, but on {whose} it is {there}. "
                "Tie it on all ranks that have it, or on none",
                leaf=name,
                ranks=sorted({other, ranks[0]}),
            )


def array_digest(leaf: LeafSource, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """A digest of an array's C-order bytes; the same wherever and however they lie.

    `buffer` holds `WINDOW_NBYTES`, unless the array lies in one row in host memory.
    """
    nbytes = leaf.nbytes
    sums = [
        _window_digest(leaf, start, min(start + WINDOW_NBYTES, nbytes), buffer)
        for start in range(0, nbytes, WINDOW_NBYTES)
    ]
    return sums[0] if len(sums) == 1 else xxh3_64(struct.pack(f"<{len(sums)}Q", *sums))


def _window_digest(
    leaf: LeafSource, start: int, stop: int, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> int:
    source: ByteSource = leaf.source
    if isinstance(source, Memory):
        return xxh3_64(view(source.address + start, stop - start).data)
    window = buffer[: stop - start]
    if isinstance(source, Produced):
        source.fill(window.data, start)
        return xxh3_64(window.data)
    pieces: list[WritePiece] = []
    at = 0
    size = source.itemsize
    for box in boxes_of_range(leaf.shape, start // size, stop // size):
        pieces.append(WritePiece(at, part_of_source(source, leaf.shape, size, box)))
        at += size * math.prod(box.shape)
    copy(pieces, window)
    return xxh3_64(window.data)


def _unequal_streams(messages: Sequence[bytes]) -> list[tuple[int, int]]:
    """The first streams of which not all holders have the same."""
    first: dict[tuple[int, int], int] = {}
    unequal: dict[tuple[int, int], None] = {}
    for message in messages:
        for item in msgspec.msgpack.decode(message, type=list[_StreamDigest]):
            place = item.replica_group, item.stream
            if first.setdefault(place, item.digest) != item.digest:
                unequal[place] = None
    return sorted(unequal)[:_MAX_STREAMS]


def _unequal_leaves(
    messages: Sequence[bytes], layouts: Sequence[LeafLayout], replica_groups: Sequence[ReplicaGroup]
) -> list[_Finding]:
    held: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
    for rank, message in enumerate(messages):
        for item in msgspec.msgpack.decode(message, type=list[_LeafDigests]):
            digests = struct.unpack(f"<{len(item.digests) // 8}Q", item.digests)
            held.setdefault((item.replica_group, item.stream), {})[rank] = digests
    found: list[_Finding] = []
    for (number, _), by_rank in sorted(held.items()):
        for place, (leaf, _) in enumerate(replica_groups[number].members):
            sets: dict[int, list[int]] = {}
            for rank, digests in by_rank.items():
                sets.setdefault(digests[place], []).append(rank)
            if len(sets) > 1 and len(found) < _MAX_LEAVES:
                found.append(_Finding(layouts[leaf].name, list(sets.values())))
    return found


def _disagreement(findings: Sequence[_Finding]) -> RanksDisagree:
    lines: list[str] = []
    different: list[int] = []
    for finding in findings:
        # What most ranks have is taken for right; among equals, what the lowest rank has.
        reference, *others = sorted(finding.sets, key=lambda ranks: (-len(ranks), ranks[0]))
        words = " and from ".join([f"that of {name_ranks(reference)}", *map(name_ranks, others[1:])])
        lines.append(f"{finding.leaf}: the copy of {name_ranks(others[0])} differs from {words}")
        different += [rank for ranks in others for rank in ranks if rank not in different]
    if len(findings) == _MAX_LEAVES:
        lines.append("... and perhaps others")
    return RanksDisagree(
        "ranks hold different values of replicated arrays:\n    "
        + "\n    ".join(lines)
        + "\n  Mark state that is meant to differ with everystep.per_rank; make everything else equal, for "
        "example by torch.distributed.broadcast from rank 0",
        leaf=findings[0].leaf if findings else None,
        ranks=sorted(different)[:_MAX_RANKS],
    )
