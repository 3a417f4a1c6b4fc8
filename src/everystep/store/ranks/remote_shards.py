"""Shards that a rank needs but does not see: they are on volumes of other nodes.

Ranks look for the file; the name of the host does not count. Hosts are renamed, volumes are moved to other
hosts, and containers may share a name.

1. Ranks say which files they need and do not see. Usually there are none, and this is all.
2. All learn of these files, and say which of them they see. One rank that sees a file becomes its reader. If
   no rank sees a file, all raise `IncompleteCheckpoint`, with its host and its volume.
3. Each rank tells the readers which bytes it needs: the requests that it would have made of the file.
4. The readers read, verify and send these bytes over gloo, one message at a time. A reader that fails keeps
   sending, so that no rank waits for it, and all ranks raise when the transfer is over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from everystep.engine import Memory, Padding, Strided, Unkept
from everystep.engine.buffers import Bytes
from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.format.geometry import whole
from everystep.plan import ByteRange
from everystep.store.names import sendable
from everystep.store.ranks.channel import Channel, Message, carry
from everystep.store.ranks.exchange import MESSAGE_NBYTES, BoxBytes, BoxMessage, LocalArray, cut
from everystep.store.ranks.meeting import Meeting
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.gather import FileReads
from everystep.store.read.shard_reader import MISSING, FragmentRequest, request_range, volume_of

_ASKED_AT_ONCE = 50_000
"""Requests in one message."""
_SHOWN = 4
_Key = tuple[int, int]


class Shard(msgspec.Struct, frozen=True, array_like=True, order=True):
    """File number `file` of what rank `part` wrote, and where that rank wrote it."""

    part: int
    file: int
    path: str
    host: str

    @property
    def key(self) -> _Key:
        return self.part, self.file


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes of a fragment of a leaf, from `offset` of its file on."""

    part: int
    file: int
    leaf: str
    offset: int
    nbytes: int


class RemoteShards:
    """What this rank does not see, read by others; and what others do not see, read by this rank.

    All ranks make one, and call the same of its methods.
    """

    def __init__(
        self,
        meeting: Meeting,
        checkpoint: Checkpoint,
        channel: Channel,
        *,
        verify: bool,
    ) -> None:
        self._meeting = meeting
        self._checkpoint = checkpoint
        self._channel = channel
        self._verify = verify
        self._unseen: list[FileReads] = []
        self._readers: dict[_Key, int] = {}

    def keep(self, reads: Sequence[FileReads]) -> list[FileReads]:
        """Takes over the reads of files that this rank does not see; those that it has to do itself.

        `IncompleteCheckpoint` on all ranks when one of them wants a file that none of them sees.
        """
        shards = {(read.rank, read.file): self._shard(read) for read in reads if read.volume is not None}
        unseen = {key: shard for key, shard in shards.items() if not _may_see(shard.path)}
        wanted = self._union(list(unseen.values()))
        if not wanted:
            return list(reads)
        self._readers = self._choose_readers(wanted)
        self._unseen = [read for read in reads if (read.rank, read.file) in unseen]
        return [read for read in reads if (read.rank, read.file) not in unseen]

    @property
    def is_needed(self) -> bool:
        """Whether any rank wants what it does not see; the same on all ranks."""
        return bool(self._readers)

    def transfer(self) -> None:
        """Gets what was kept, and reads what others want. Raises what this rank met when it read."""
        asking = list(self._asking())
        batches: list[tuple[int, bytes]] = []
        for reader in sorted({reader for reader, _, _ in asking}):
            of_this = [asked for other, asked, _ in asking if other == reader]
            for at in range(0, len(of_this), _ASKED_AT_ONCE):
                batches.append((reader, msgspec.msgpack.encode(of_this[at : at + _ASKED_AT_ONCE])))
        heard: dict[int, list[Asked]] = {}
        for asker, data in self._meeting.deliver(batches):
            heard.setdefault(asker, []).extend(msgspec.msgpack.decode(data, type=list[Asked]))
        desk = _Desk(self._checkpoint, verify=self._verify)
        messages: list[Message] = [*self._inward(asking), *self._outward(heard, desk)]
        carry(self._channel, messages, self._meeting.timeout)
        if desk.error is not None:
            raise desk.error

    def _shard(self, read: FileReads) -> Shard:
        file = self._checkpoint._parts[read.rank].files[read.file]
        path = os.path.join(file.volume or "", file.name)
        return Shard(read.rank, read.file, path, file.host or "")

    def _union(self, unseen: Sequence[Shard]) -> list[Shard]:
        """All files that some rank wants and does not see."""

        def unite(heard: Sequence[bytes]) -> bytes:
            found = {shard for data in heard for shard in msgspec.msgpack.decode(data, type=list[Shard])}
            return msgspec.msgpack.encode(sorted(found))

        mine = msgspec.msgpack.encode(unseen)
        data = self._meeting.agree(mine, unite)
        return msgspec.msgpack.decode(data, type=list[Shard])

    def _choose_readers(self, wanted: Sequence[Shard]) -> dict[_Key, int]:
        """One rank for each file, of those that see it."""

        def choose(heard: Sequence[bytes]) -> bytes:
            seeing: dict[int, list[int]] = {}
            for rank, data in enumerate(heard):
                for number in msgspec.msgpack.decode(data, type=list[int]):
                    seeing.setdefault(number, []).append(rank)
            files = [0] * self._meeting.world
            chosen: list[int | None] = []
            for number in range(len(wanted)):
                reader = min(seeing.get(number, ()), key=lambda rank: (files[rank], rank), default=None)
                chosen.append(reader)
                if reader is not None:
                    files[reader] += 1
            return msgspec.msgpack.encode(chosen)

        seen = [number for number, shard in enumerate(wanted) if os.path.isfile(shard.path)]
        mine = msgspec.msgpack.encode(seen)
        data = self._meeting.agree(mine, choose)
        chosen = msgspec.msgpack.decode(data, type=list[int | None])
        gone = [shard for shard, reader in zip(wanted, chosen, strict=True) if reader is None]
        if gone:
            raise _out_of_reach(gone, sorted({member.host for member in self._meeting.membership.members}))
        readers = zip(wanted, chosen, strict=True)
        return {shard.key: reader for shard, reader in readers if reader is not None}

    def _asking(self) -> Iterator[tuple[int, Asked, BoxBytes]]:
        """What this rank asks of whom, and where it goes; cut so that each can be verified by itself."""
        for read in self._unseen:
            reader = self._readers[read.rank, read.file]
            chunk = self._checkpoint._parts[read.rank].chunk_nbytes
            most = chunk * max(1, MESSAGE_NBYTES // chunk)
            for request in sorted(read.requests, key=lambda request: request.piece.offset):
                place = _place(request)
                nbytes = request.piece.destination.nbytes
                for start in range(0, nbytes if place is not None else 0, most):
                    assert place is not None
                    stop = min(start + most, nbytes)
                    offset = request.piece.offset + start
                    asked = Asked(read.rank, read.file, request.leaf, offset, stop - start)
                    yield reader, asked, BoxBytes(place, whole(place.shape), start, stop)

    def _inward(self, asking: Sequence[tuple[int, Asked, BoxBytes]]) -> Iterator[Message]:
        by_reader: dict[int, list[BoxBytes]] = {}
        for reader, _, span in asking:
            by_reader.setdefault(reader, []).append(span)
        for reader, spans in by_reader.items():
            for number, part in enumerate(_messages([span.nbytes for span in spans])):
                found = tuple(spans[index] for index in part)
                yield BoxMessage(number, reader, self._meeting.rank, False, found)

    def _outward(self, heard: Mapping[int, Sequence[Asked]], desk: _Desk) -> Iterator[Message]:
        for asker, asked in heard.items():
            for number, part in enumerate(_messages([item.nbytes for item in asked])):
                found = tuple(asked[index] for index in part)
                yield _Answer(number, self._meeting.rank, asker, True, found, desk)


class _Desk:
    """Reads for other ranks. The first error is kept, and the bytes are then no matter."""

    def __init__(self, checkpoint: Checkpoint, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._verify = verify
        self._last: tuple[tuple[Asked, ...], Bytes] | None = None
        self.error: Exception | None = None

    def fill(self, asked: tuple[Asked, ...], buffer: Bytes) -> None:
        """Ranks of several nodes ask for the same, one after the other: it is read once."""
        if self._last is not None and self._last[0] == asked:
            buffer[:] = self._last[1]
            return
        if self.error is not None:
            buffer[:] = 0
            return
        try:
            self._read(asked, buffer)
        except Exception as error:  # raised when the transfer is over
            buffer[:] = 0
            self.error = error
        self._last = asked, buffer

    def _read(self, asked: Sequence[Asked], buffer: Bytes) -> None:
        in_files: dict[_Key, list[FragmentRequest]] = {}
        at = 0
        for item in asked:
            where = Memory(buffer.ctypes.data + at, item.nbytes, buffer)
            in_files.setdefault((item.part, item.file), []).append(self._request(item, where))
            at += item.nbytes
        for (rank, file), requests in in_files.items():
            reader = self._checkpoint._reader.shards(rank)
            for problem in reader.file_problems(file, requests, verify=self._verify, whole=False):
                raise problem.error()

    def _request(self, item: Asked, where: Memory) -> FragmentRequest:
        part = self._checkpoint._parts[item.part]
        leaf = self._checkpoint._parts.leaves_of(item.part).get(item.leaf)
        for fragment in () if leaf is None else leaf.fragments:
            start = item.offset - fragment.offset
            if fragment.file == item.file and 0 <= start <= fragment.nbytes - item.nbytes:
                span = ByteRange(start, start + item.nbytes)
                return request_range(item.leaf, fragment, span, part.chunk_nbytes, where)
        raise CorruptCheckpoint(
            "another rank asked for bytes that this leaf does not have",
            path=self._checkpoint.path,
            leaf=item.leaf,
        )


@dataclass(frozen=True, slots=True)
class _Answer(Message):
    """Bytes that are read when the message is sent."""

    asked: tuple[Asked, ...]
    desk: _Desk

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.asked)

    def direct(self) -> Bytes | None:
        return None

    def gather(self, buffer: Bytes) -> None:
        self.desk.fill(self.asked, buffer)

    def scatter(self, buffer: Bytes) -> None:
        raise AssertionError("this is sent, not received")


def _messages(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Which pieces go in which message: they are small enough already."""
    for message in cut(sizes, most=max(sizes, default=0)):
        yield [index for index, _, _ in message]


def _place(request: FragmentRequest) -> LocalArray | None:
    """Where the bytes of a request go; None when only their checksum matters."""
    where = request.piece.destination
    if isinstance(where, Unkept | Padding):
        return None
    if isinstance(where, Strided):
        return LocalArray(where, where.shape, where.itemsize)
    return LocalArray(where, (where.nbytes,), 1)


def _may_see(path: str) -> bool:
    """Whether there is such a file, or something is wrong that its reader shall tell."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _out_of_reach(gone: Sequence[Shard], hosts: Sequence[str]) -> IncompleteCheckpoint:
    shard = gone[0]
    volume = volume_of(os.path.dirname(shard.path))
    shown = ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")
    more = f" (and {len(gone) - 1} more files)" if len(gone) > 1 else ""
    if shard.host in hosts:
        advice = f"no rank on {shown} sees it{more}: mount that volume again, or put the file back"
    else:
        advice = (
            f"the ranks run on {shown} and do not see it{more}: restore with a rank on {shard.host}, or make "
            f"the files of {volume} available in the same directory on one of these hosts. To do without "
            "this checkpoint, restore an older step by its number, if that step does not need this host"
        )
    where = f"volume {volume} of host {shard.host}"
    error = IncompleteCheckpoint(f"{MISSING}: it was written to {where}; {advice}", path=sendable(shard.path))
    error.out_of_reach = shard.host not in hosts
    return error
