"""Reading out of one part's shards: requests in, verified bytes out, damage as typed errors."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import Struct

from everystep import engine
from everystep.engine import READING, Destination, Pieces, ReadPiece, Tuning, Unkept
from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.format.checksums import HEX_DIGITS, digest
from everystep.format.records import EMBEDDED, Fragment, Leaf, Part, ShardFile
from everystep.plan import ByteRange
from everystep.store.read.file_access import FileAccess
from everystep.store.read.read_errors import open_stored, patiently, reading, require_regular


class FragmentRequest(Struct, frozen=True, gc=False):
    """Some bytes of a fragment of a leaf, in file number `file`, and where they go.

    If they are verified, they begin where checksum number `chunk` of the fragment does.
    """

    leaf: str
    file: int
    piece: ReadPiece
    chunk: int = 0


def request_fragment(leaf: str, fragment: Fragment, destination: Destination | Unkept) -> FragmentRequest:
    """All of a fragment."""
    return FragmentRequest(leaf, fragment.file, ReadPiece(fragment.offset, destination, fragment.chunks))


def request_range(
    leaf: str, fragment: Fragment, span: ByteRange, chunk_nbytes: int, destination: Destination | Unkept
) -> FragmentRequest:
    """Some bytes of a fragment: whole chunks, if they are verified."""
    first, last = span.start // chunk_nbytes, -(-span.stop // chunk_nbytes)
    checksums = fragment.chunks[first * HEX_DIGITS : last * HEX_DIGITS]
    return FragmentRequest(
        leaf, fragment.file, ReadPiece(fragment.offset + span.start, destination, checksums), first
    )


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """Something that is wrong in one file.

    Attributes:
        file: The path of the file.
        reason: What is wrong.
        leaf: The leaf that it concerns, if any.
        out_of_reach: The file lies on a volume of another host, which cannot be reached from here.
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

    def __init__(self, part: Part, hold: FileAccess, tuning: Tuning = READING) -> None:
        self._part = part
        self._hold = hold
        self._tuning = tuning

    def read(
        self,
        requests: Sequence[FragmentRequest],
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
        requests: Iterable[FragmentRequest],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[VerifyProblem]:
        """Reads, and returns everything that is wrong. `progress` gets the bytes of all files so far."""
        in_files: list[list[FragmentRequest]] = [[] for _ in self._part.files]
        for item in requests:
            in_files[item.file].append(item)
        found: list[VerifyProblem] = []
        done = 0
        for index, in_file in enumerate(in_files):
            if in_file or whole:
                advance = after(done, progress)
                found += self.file_problems(index, in_file, verify=verify, whole=whole, progress=advance)
                done += sum(item.piece.destination.nbytes for item in in_file)
        return found

    def file_problems(
        self,
        index: int,
        requests: Sequence[FragmentRequest],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[VerifyProblem]:
        """Reads out of one file."""
        # An empty array lies where the next one begins, and has to come first.
        in_file = sorted(requests, key=lambda item: (item.piece.offset, item.piece.destination.nbytes))
        pieces = engine.destinations([item.piece for item in in_file])

        def owner(number: int) -> tuple[str, int]:
            return in_file[number].leaf, in_file[number].chunk

        return self._problems(index, pieces, owner, verify=verify, whole=whole, progress=progress)

    def read_whole_leaves(
        self,
        leaves: Sequence[Leaf],
        addresses: Sequence[int],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """As `read`: leaves that are stored in one piece, each to the memory at its address.

        The caller keeps the memory alive. Does as little as possible for each leaf: there may be hundreds of
        thousands.
        """
        fragments = [leaf.fragments[0] for leaf in leaves]
        # An empty array lies where the next one begins, and has to come first.
        places = [2 * fragment.offset + (fragment.nbytes > 0) for fragment in fragments]
        order = sorted(range(len(leaves)), key=places.__getitem__)
        done = 0
        for index in range(len(self._part.files)):
            in_file = [number for number in order if fragments[number].file == index]
            if in_file or whole:
                pieces = Pieces.to_memory(
                    [fragments[number].offset for number in in_file],
                    [fragments[number].nbytes for number in in_file],
                    [addresses[number] for number in in_file],
                    [fragments[number].chunks for number in in_file],
                )
                owner = _owner([leaves[number] for number in in_file])
                advance = after(done, progress)
                found = self._problems(index, pieces, owner, verify=verify, whole=whole, progress=advance)
                for problem in found:
                    raise problem.error()
                done += pieces.nbytes

    def _problems(
        self,
        index: int,
        pieces: Pieces,
        owner: Callable[[int], tuple[str, int]],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None,
    ) -> list[VerifyProblem]:
        """Reads pieces out of one file. `owner` gives the leaf of a piece, and the piece's first chunk."""
        file = self._part.files[index]
        count = len(pieces)
        numbers: Sequence[int] = range(count)
        leaf = owner(0)[0] if count else None
        if verify and whole:
            pieces, numbers = pieces.padded(file.header_nbytes, file.nbytes)
        # A retry reads everything again: what was put in place by then is put there once more.
        read = partial(self._read_file, file, leaf, pieces, verify=verify, whole=whole, progress=progress)
        found, damages = patiently(read)
        for damage in damages:
            number = numbers[damage.piece]
            if number >= count:
                found.append(VerifyProblem(self.shown_path(file), "the padding between leaves is not zero"))
            else:
                leaf, chunk = owner(number)
                reason = f"chunk {chunk + damage.chunk} does not match its checksum"
                found.append(VerifyProblem(self.shown_path(file), reason, leaf))
        return found

    def _read_file(
        self,
        file: ShardFile,
        leaf: str | None,
        pieces: Pieces,
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None,
    ) -> tuple[list[VerifyProblem], Sequence[engine.Damage]]:
        """What is wrong with the file, and with pieces of it. `leaf`: to be named if all of it is missing."""
        shown, path = self.shown_path(file), self.path(file)
        with reading(shown):
            problem = self._file_problem(file, path, shown, leaf)
            if problem is not None:
                return [problem], []
            found: list[VerifyProblem] = []
            # A header that holds the manifest was verified when that was read.
            if verify and whole and file.header_xxh3 != EMBEDDED:
                with open_stored(path, shown) as opened:
                    header = opened.read(file.header_nbytes)
                if digest(header) != file.header_xxh3:
                    reason = "the shard's header does not match its checksum"
                    found.append(VerifyProblem(shown, reason))
            tuning = replace(self._tuning, backend=self.backend(file))
            return found, engine.read(
                path,
                pieces,
                tuning=tuning,
                chunk_nbytes=self._part.chunk_nbytes,
                verify=verify,
                progress=progress,
            )

    def visible_damage(self, *, far: bool = True) -> VerifyProblem | None:
        """The damage that shows without reading: a shard that is missing, or has the wrong size.

        `far`: a shard on a volume of another host counts as damaged if it cannot be reached from here.
        """
        for file in self._part.files:
            problem = patiently(partial(self._visible_problem, file))
            if problem is not None and (far or not problem.out_of_reach):
                return problem
        return None

    def _visible_problem(self, file: ShardFile) -> VerifyProblem | None:
        shown = self.shown_path(file)
        with reading(shown):
            return self._file_problem(file, self.path(file), shown, None)

    def _file_problem(self, file: ShardFile, path: str, shown: str, leaf: str | None) -> VerifyProblem | None:
        try:
            nbytes = require_regular(path, shown).st_size
        except FileNotFoundError:
            self._hold.require_current()
            return VerifyProblem(shown, _missing(file), leaf or self._first_leaf(file, 0), _is_far(file))
        if nbytes != file.nbytes:
            reason = f"the file has {nbytes} bytes instead of {file.nbytes}"
            return VerifyProblem(shown, reason, self._first_leaf(file, nbytes) or leaf)
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

    def backend(self, file: ShardFile) -> engine.Backend:
        """How to read it."""
        # By name: a path through a descriptor does not say on which device the file is.
        allow_other_files = os.path.join(file.volume or self._hold.directory, file.name)
        return engine.choose_read_backend(allow_other_files, self._tuning.backend)

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


def whole_leaf(leaf: Leaf, destination: Destination | Unkept) -> FragmentRequest:
    """All of a leaf that is stored in one piece."""
    (fragment,) = leaf.fragments
    return request_fragment(leaf.name, fragment, destination)


def _owner(leaves: Sequence[Leaf]) -> Callable[[int], tuple[str, int]]:
    return lambda number: (leaves[number].name, 0)


def after(done: int, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """The progress of a file, after `done` bytes of others."""
    return None if progress is None else lambda nbytes: progress(done + nbytes)
