"""Reading leaves out of a part's shards: requests in, verified bytes out, damage as typed errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast import engine
from holdfast.engine import Destination, Padding, ReadPiece, Tuning, Unkept
from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint
from holdfast.format.checksums import digest
from holdfast.format.embedded import check_header
from holdfast.format.records import EMBEDDED, Fragment, Leaf, Part, ShardFile
from holdfast.plan import ByteRange, gaps
from holdfast.store.failures import reading, require_regular
from holdfast.store.hold import Hold


@dataclass(frozen=True, slots=True)
class Wanted:
    """A whole leaf and where it shall go."""

    leaf: Leaf
    destination: Destination | Unkept


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in one file, and the leaf it concerns, if any."""

    file: str
    reason: str
    leaf: str | None = None


class ShardReader:
    """The shards of one part, in the directory that `hold` holds for as long as anything can be read."""

    def __init__(self, part: Part, hold: Hold, tuning: Tuning | None = None) -> None:
        self._part = part
        self._hold = hold
        self._tuning = tuning or Tuning()

    def read(
        self,
        wanted: Sequence[Wanted],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads leaves; `CorruptCheckpoint` names file and leaf. `whole`: checks header and padding, too."""
        for problem in self.problems(wanted, verify=verify, whole=whole, progress=progress):
            kind = IncompleteCheckpoint if problem.reason == MISSING else CorruptCheckpoint
            raise kind(problem.reason, path=problem.file, leaf=problem.leaf)

    def problems(
        self,
        wanted: Sequence[Wanted],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[Problem]:
        """Reads leaves and returns all that is wrong with them."""
        found: list[Problem] = []
        for index, file in enumerate(self._part.files):
            in_file = [
                (fragment, request)
                for request in wanted
                for fragment in request.leaf.fragments
                if fragment.file == index
            ]
            in_file.sort(key=lambda item: item[0].offset)
            if in_file or whole:
                found += self._read_file(file, in_file, verify=verify, whole=whole, progress=progress)
        return found

    def visible_damage(self) -> Problem | None:
        """The damage that shows without reading: a shard that is gone, or has another size."""
        return next(filter(None, (self._file_problem(file, None) for file in self._part.files)), None)

    def read_range(self, leaf: Leaf, span: ByteRange, *, verify: bool = True) -> memoryview:
        """Some bytes of a leaf. What is read is rounded out to chunks, so that it can be verified."""
        (fragment,) = leaf.fragments
        file = self._part.files[fragment.file]
        chunk = self._part.chunk_nbytes
        outer = span.rounded_out(chunk, fragment.nbytes) if verify else span
        buffer = np.empty(outer.nbytes, np.uint8)
        memory = engine.Memory(buffer.ctypes.data, outer.nbytes, buffer)
        first, last = outer.start // chunk, -(-outer.stop // chunk)
        checksums = fragment.chunks[first * 16 : last * 16]
        piece = ReadPiece(fragment.offset + outer.start, memory, checksums)
        problem = self._file_problem(file, leaf.name)
        if problem is None:
            damage = self._engine_read(file, [piece], verify=verify)
            if damage:
                problem = Problem(self._shown_path(file), _damaged(first + damage[0].chunk), leaf.name)
        if problem is not None:
            kind = IncompleteCheckpoint if problem.reason == MISSING else CorruptCheckpoint
            raise kind(problem.reason, path=problem.file, leaf=problem.leaf)
        inner = span.start - outer.start
        return buffer[inner : inner + span.nbytes].data

    def _read_file(
        self,
        file: ShardFile,
        in_file: list[tuple[Fragment, Wanted]],
        *,
        verify: bool,
        whole: bool,
        progress: Callable[[int], None] | None,
    ) -> list[Problem]:
        shown = self._shown_path(file)
        problem = self._file_problem(file, in_file[0][1].leaf.name if in_file else None)
        if problem is not None:
            return [problem]
        found: list[Problem] = []
        pieces = [ReadPiece(f.offset, request.destination, f.chunks) for f, request in in_file]
        names: list[str | None] = [request.leaf.name for _, request in in_file]
        if verify and whole:
            found += self._header_problem(file)
            taken = [ByteRange(f.offset, f.offset + f.nbytes) for f, _ in in_file]
            padding = list(gaps(taken, file.header_nbytes, file.nbytes))
            merged = sorted(
                [
                    *zip(pieces, names, strict=True),
                    *((ReadPiece(p.start, Padding(p.nbytes)), None) for p in padding),
                ],
                key=lambda item: item[0].offset,
            )
            pieces = [piece for piece, _ in merged]
            names = [name for _, name in merged]
        for damage in self._engine_read(file, pieces, verify=verify, progress=progress):
            name = names[damage.piece]
            reason = _damaged(damage.chunk) if name is not None else "the padding between leaves is not zero"
            found.append(Problem(shown, reason, name))
        return found

    def _engine_read(
        self,
        file: ShardFile,
        pieces: list[ReadPiece],
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
    ) -> list[engine.Damage]:
        path = self._path(file)
        with reading(self._shown_path(file)):
            beside = os.path.join(self._hold.directory, file.name)
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
        with reading(self._shown_path(file)):
            try:
                nbytes = require_regular(self._path(file), self._shown_path(file)).st_size
            except FileNotFoundError:
                return Problem(self._shown_path(file), MISSING, leaf or self._first_leaf(file, 0))
        if nbytes != file.nbytes:
            reason = f"the file has {nbytes} bytes instead of {file.nbytes}"
            return Problem(self._shown_path(file), reason, self._first_leaf(file, nbytes) or leaf)
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
        with reading(self._shown_path(file)), open(self._path(file), "rb") as opened:
            header = opened.read(file.header_nbytes)
        if file.header_xxh3 == EMBEDDED:
            try:
                check_header(header, file.nbytes, self._shown_path(file))
            except CorruptCheckpoint as error:
                return [Problem(self._shown_path(file), error.reason, None)]
        elif digest(header) != file.header_xxh3:
            return [Problem(self._shown_path(file), "the shard's header does not match its checksum", None)]
        return []

    def _path(self, file: ShardFile) -> str:
        return self._hold.file(file.name)

    def _shown_path(self, file: ShardFile) -> str:
        return os.path.join(self._hold.path, file.name)


MISSING = "the file is missing"


def _damaged(chunk: int) -> str:
    return f"chunk {chunk} does not match its checksum"
