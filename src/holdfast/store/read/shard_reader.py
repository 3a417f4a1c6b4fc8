"""Reading out of one part's shards: requests in, verified bytes out, damage as typed errors."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import Struct

from holdfast import engine
from holdfast.engine import READING, Destination, Padding, ReadPiece, Tuning, Unkept
from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint
from holdfast.format.checksums import HEX_DIGITS, digest
from holdfast.format.embedded import check_header
from holdfast.format.records import EMBEDDED, Fragment, Leaf, Part, ShardFile
from holdfast.plan import ByteRange, gaps
from holdfast.store.os_errors import open_stored, patiently, reading, require_regular
from holdfast.store.read.reader_lock import ReaderLock


class Request(Struct, frozen=True, gc=False):
    """Some bytes of a fragment of a leaf, in file number `file`, and where they go.

    They begin where checksum number `chunk` of the fragment does, or they are not to be verified.
    """

    leaf: str
    file: int
    piece: ReadPiece
    chunk: int = 0


def request(leaf: str, fragment: Fragment, destination: Destination | Unkept) -> Request:
    """All of a fragment."""
    return Request(leaf, fragment.file, ReadPiece(fragment.offset, destination, fragment.chunks))


def request_range(
    leaf: str, fragment: Fragment, span: ByteRange, chunk_nbytes: int, destination: Destination | Unkept
) -> Request:
    """Some bytes of a fragment: whole chunks of it, unless they are not to be verified."""
    first, last = span.start // chunk_nbytes, -(-span.stop // chunk_nbytes)
    checksums = fragment.chunks[first * HEX_DIGITS : last * HEX_DIGITS]
    return Request(
        leaf, fragment.file, ReadPiece(fragment.offset + span.start, destination, checksums), first
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in one file, and the leaf it concerns, if any.

    `out_of_reach`: it lies on a volume of another host, and is not seen from here.
    """

    file: str
    reason: str
    leaf: str | None = None
    out_of_reach: bool = False

    @property
    def missing(self) -> bool:
        return self.reason.startswith(MISSING)

    def error(self) -> CorruptCheckpoint:
        if not self.missing:
            return CorruptCheckpoint(self.reason, path=self.file, leaf=self.leaf)
        error = IncompleteCheckpoint(self.reason, path=self.file, leaf=self.leaf)
        error.out_of_reach = self.out_of_reach
        return error


MISSING = "the file is missing"
_ID = re.compile(r"[0-9a-f]{32}")


class ShardReader:
    """The shards of one part, in the directory that `hold` holds for as long as anything can be read."""

    def __init__(self, part: Part, hold: ReaderLock, tuning: Tuning = READING) -> None:
        self._part = part
        self._hold = hold
        self._tuning = tuning

    def read(
        self,
        requests: Sequence[Request],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads; `CorruptCheckpoint` names file and leaf. `whole`: checks header and padding, too."""
        for problem in self.problems(requests, verify=verify, whole=whole, progress=progress):
            raise problem.error()

    def problems(
        self,
        requests: Iterable[Request],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[Problem]:
        """Reads, and returns all that is wrong. `progress` is told the bytes of the files before as well."""
        in_files: list[list[Request]] = [[] for _ in self._part.files]
        for item in requests:
            in_files[item.file].append(item)
        found: list[Problem] = []
        done = 0
        for index, in_file in enumerate(in_files):
            if in_file or whole:
                advance = None if progress is None else _later(progress, done)
                found += self.file_problems(index, in_file, verify=verify, whole=whole, progress=advance)
                done += sum(item.piece.destination.nbytes for item in in_file)
        return found

    def file_problems(
        self,
        index: int,
        requests: Sequence[Request],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[Problem]:
        """Reads out of one file."""
        file = self._part.files[index]
        # An empty array lies where the next one begins, and has to come first.
        in_file = sorted(requests, key=lambda item: (item.piece.offset, item.piece.destination.nbytes))
        problem = patiently(lambda: self._file_problem(file, in_file[0].leaf if in_file else None))
        if problem is not None:
            return [problem]
        found: list[Problem] = []
        pieces = [item.piece for item in in_file]
        owners: list[Request | None] = list(in_file)
        if verify and whole:
            found += patiently(lambda: self._header_problem(file))
            taken = (ByteRange(piece.offset, piece.offset + piece.destination.nbytes) for piece in pieces)
            padding = list(gaps(taken, file.header_nbytes, file.nbytes))
            pieces += [ReadPiece(gap.start, Padding(gap.nbytes)) for gap in padding]
            owners += [None] * len(padding)
            order = sorted(range(len(pieces)), key=lambda number: pieces[number].offset)
            pieces = [pieces[number] for number in order]
            owners = [owners[number] for number in order]
        shown = self.shown_path(file)
        # Again, if need be, from the start: what was put in place by then is put there once more.
        damages = patiently(lambda: self._engine_read(file, pieces, verify=verify, progress=progress))
        for damage in damages:
            owner = owners[damage.piece]
            if owner is None:
                found.append(Problem(shown, "the padding between leaves is not zero"))
            else:
                reason = f"chunk {owner.chunk + damage.chunk} does not match its checksum"
                found.append(Problem(shown, reason, owner.leaf))
        return found

    def visible_damage(self, *, far: bool = True) -> Problem | None:
        """The damage that shows without reading: a shard that is gone, or has another size.

        `far`: a shard on a volume of another host counts as gone when it cannot be reached from here.
        """
        for file in self._part.files:
            problem = patiently(partial(self._file_problem, file, None))
            if problem is not None and (far or not problem.out_of_reach):
                return problem
        return None

    def _engine_read(
        self,
        file: ShardFile,
        pieces: list[ReadPiece],
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[engine.Damage]:
        path = self.path(file)
        with reading(self.shown_path(file)):
            # By name: what holds a file open by descriptor does not say on which device it is.
            beside = os.path.join(file.volume or self._hold.directory, file.name)
            tuning = replace(self._tuning, backend=engine.choose_read_backend(beside, self._tuning.backend))
            return engine.read(
                path,
                pieces,
                tuning=tuning,
                chunk_nbytes=self._part.chunk_nbytes,
                verify=verify,
                progress=progress,
            )

    def _file_problem(self, file: ShardFile, leaf: str | None) -> Problem | None:
        with reading(self.shown_path(file)):
            try:
                nbytes = require_regular(self.path(file), self.shown_path(file)).st_size
            except FileNotFoundError:
                self._hold.require_current()
                where, leaf = self.shown_path(file), leaf or self._first_leaf(file, 0)
                return Problem(where, _missing(file), leaf, _is_far(file))
        if nbytes != file.nbytes:
            reason = f"the file has {nbytes} bytes instead of {file.nbytes}"
            return Problem(self.shown_path(file), reason, self._first_leaf(file, nbytes) or leaf)
        return None

    def _first_leaf(self, file: ShardFile, after: int) -> str | None:
        """The first leaf that reaches past `after` in the file."""
        index = self._part.files.index(file)
        reach = [
            (fragment.offset, leaf.name)
            for leaf in self._part.leaves
            for fragment in leaf.fragments
            if fragment.file == index and fragment.offset + fragment.nbytes > after
        ]
        return min(reach)[1] if reach else None

    def _header_problem(self, file: ShardFile) -> list[Problem]:
        shown = self.shown_path(file)
        with reading(shown), open_stored(self.path(file), shown) as opened:
            header = opened.read(file.header_nbytes)
        if file.header_xxh3 == EMBEDDED:
            try:
                check_header(header, file.nbytes, self.shown_path(file))
            except CorruptCheckpoint as error:
                return [Problem(self.shown_path(file), error.reason, None)]
        elif digest(header) != file.header_xxh3:
            return [Problem(self.shown_path(file), "the shard's header does not match its checksum", None)]
        return []

    def path(self, file: ShardFile) -> str:
        """The path to open a shard by."""
        return self._hold.file(file.name) if file.volume is None else os.path.join(file.volume, file.name)

    def shown_path(self, file: ShardFile) -> str:
        """The path to name it by."""
        return os.path.join(file.volume or self._hold.path, file.name)


def _missing(file: ShardFile) -> str:
    if file.volume is None:
        return MISSING
    host = f" of host {file.host}" if file.host else ""
    volume = volume_of(file.volume)
    if file.host == socket.gethostname() and os.path.isdir(volume):
        return f"{MISSING}: it was on volume {volume} of this host, and has been removed from there"
    return (
        f"{MISSING}: it lies on volume {volume}{host}, which cannot be reached from here: mount it, or load "
        "with ranks on all hosts that saved it, which read for each other"
    )


def _is_far(file: ShardFile) -> bool:
    """Whether it was written to a volume of another host, which may be that host's own."""
    return file.volume is not None and file.host != socket.gethostname()


def volume_of(directory: str) -> str:
    """The volume, as it was given, of a directory of shards, ``VOLUME/RUN-xxxxxxxx/ID``; else that itself."""
    home, id = os.path.split(directory)
    return os.path.dirname(home) if _ID.fullmatch(id) else directory


def whole_leaf(leaf: Leaf, destination: Destination | Unkept) -> Request:
    """All of a leaf that is stored in one piece."""
    (fragment,) = leaf.fragments
    return request(leaf.name, fragment, destination)


def _later(progress: Callable[[int], None], done: int) -> Callable[[int], None]:
    return lambda nbytes: progress(done + nbytes)
