"""A `Source` as a checkpoint that the rest of the library reads like one of its own.

This module turns the description into the records of our format. The files of a foreign checkpoint lie
anywhere, have no checksums and are not locked. All else (slices, union of pieces, restores into any layout
and on any number of ranks) is the same as for a native checkpoint.

`everystep.store.read.foreign` calls the functions of this module that take a path.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from everystep import engine
from everystep.engine import CHUNK_NBYTES, READING, Pieces, Tuning
from everystep.errors import CheckpointClosed, IncompleteCheckpoint, UnsupportedSource
from everystep.format.dtypes import is_known, itemsize, opaque
from everystep.format.geometry import whole
from everystep.format.records import Alias, Fragment, Leaf, Part, Root, ShardFile
from everystep.format.validate import is_own_name
from everystep.state.node import unmatched
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.gather import FileReads
from everystep.store.read.leaf_reader import LeafReader
from everystep.store.read.listing import natural_order
from everystep.store.read.parts import Parts
from everystep.store.read.read_errors import reading
from everystep.store.read.requests import BoxRequest
from everystep.store.read.shard_reader import ShardReader, VerifyProblem
from everystep.universal.inflation import refuse_bomb
from everystep.universal.recognition import brief_findings, describe, find_reader
from everystep.universal.reduction import reduced
from everystep.universal.source import Computed, Source, SourceFragment, SourceLeaf

_NO_CHECKSUM = "0" * 16
_MAX_LOOKED_INTO = 1000


def recognises(path: str) -> bool:
    """Whether a known system wrote what is at a path."""
    return find_reader(path) is not None


def checkpoints_in(directory: str) -> list[str]:
    """The names of checkpoints directly in a directory, sorted, such as a Trainer's ``checkpoint-10``."""
    names = sorted(os.listdir(directory), key=natural_order)[:_MAX_LOOKED_INTO]
    return [name for name in names if recognises(os.path.join(directory, name))]


def looked_for(path: str) -> str:
    """A sentence for messages: what was found there, and what was looked for."""
    return brief_findings(path)


def open_foreign(path: str, tuning: Tuning = READING) -> ForeignCheckpoint:
    """The checkpoint of another system at a path."""
    return ForeignCheckpoint(describe(path), tuning)


class SourceFiles:
    """Access to the files of a source. Each is known by its absolute path, or is computed when it is read."""

    def __init__(self, source: Source, computed: Mapping[str, Computed]) -> None:
        self._path = source.path
        self._computed = computed
        self._lock = threading.Lock()
        self._made: tuple[str, int] | None = None
        self._closed = False
        self._backends: dict[str, engine.Backend] = {}

    @property
    def path(self) -> str:
        return self._path

    @property
    def directory(self) -> str:
        return os.path.dirname(self._path)

    def file(self, name: str) -> str:
        if self._closed:
            raise CheckpointClosed(f"the checkpoint {self._path} has been closed")
        return name

    def pin(self, names: Iterable[str]) -> bool:
        return True

    def require_current(self) -> None:
        """Does nothing: Everystep never replaces a foreign checkpoint."""

    def backend(self, name: str, forced: str | None) -> engine.Backend:
        """How to read a file. Finding out takes a read of its own, so it is done once."""
        found = self._backends.get(name)
        if found is None:
            found = self._backends[name] = engine.choose_read_backend(name, forced, may_write=False)
        return found

    def is_computed(self, name: str) -> bool:
        return name in self._computed

    @contextmanager
    def made(self, name: str, nbytes: int) -> Iterator[str]:
        """The path of a computed file, in memory. One at a time: the next one takes the place of the last."""
        with self._lock:
            self.file(name)
            if self._made is None or self._made[0] != name:
                self._drop()
                descriptor = os.memfd_create("everystep", os.MFD_CLOEXEC)
                try:
                    with os.fdopen(os.dup(descriptor), "wb") as file:
                        self._computed[name].write(file)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._made = name, descriptor
            yield f"/proc/self/fd/{self._made[1]}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            os.close(made[1])

    def __del__(self) -> None:
        self._drop()


class _SourceShards(ShardReader):
    """Reads out of foreign files: without checksums, and without writing anything beside them."""

    def __init__(self, part: Part, files: SourceFiles, tuning: Tuning) -> None:
        super().__init__(part, files, tuning)
        self._files = files
        self._made: str | None = None

    def _problems(self, index: int, pieces: Pieces, owner: Any, **how: Any) -> list[VerifyProblem]:
        how.update(verify=False, whole=False)
        file = self._part.files[index]
        if not self._files.is_computed(file.name):
            return super()._problems(index, pieces, owner, **how)
        with self._files.made(file.name, file.nbytes) as self._made:
            try:
                return super()._problems(index, pieces, owner, **how)
            finally:
                self._made = None  # the next file may be on disk

    def backend(self, file: ShardFile) -> engine.Backend:
        if self._made is not None:
            return "buffered"
        return self._files.backend(file.name, self._tuning.backend)

    def path(self, file: ShardFile) -> str:
        return super().path(file) if self._made is None else self._made


class _SourceLeaves(LeafReader):
    """Reads the leaves of a source. Nothing that it reads can be verified."""

    def __init__(self, source: Source, tuning: Tuning) -> None:
        records = _Records(source, tuning.max_inflation)
        self._files = SourceFiles(source, records.computed)
        super().__init__(Parts(records.root(), self._files, source.path), self._files, tuning)

    def reads(self, wanted: Sequence[BoxRequest], *, verify: bool = True) -> list[FileReads]:
        return super().reads(wanted, verify=False)

    def shards(self, rank: int) -> ShardReader:
        return _SourceShards(self.parts[rank], self._files, self.tuning)


class ForeignCheckpoint(Checkpoint):
    """A checkpoint of another system, read as one of ours."""

    def __init__(self, source: Source, tuning: Tuning = READING) -> None:
        super().__init__(_SourceLeaves(source, tuning))
        self.source = source
        self._chosen = False

    @property
    def _stated_step(self) -> int | None:
        return self.source.step

    @property
    def _facts(self) -> Mapping[str, str]:
        source = self.source
        view = "arranged as a training state" if source.arranged else "as its own library loads it"
        return {"kind": source.kind, "view": view, **source.facts}

    def _arrange(self, as_training: bool | None) -> None:
        self._chosen = as_training is not None
        if as_training not in (None, self.source.arranged):
            self._replace(describe(self.source.path, self.source.kind, as_training=as_training))

    def _fit_to(self, target: object) -> None:
        """Arranges the source as a training state, unless the target fits it only as it is.

        A training names its model and optimizer; files may have them under other names, or under none.
        """
        own = self.source.state
        if self._chosen or self.source.arranged or type(target) is not dict:
            return
        arranged = describe(self.source.path, self.source.kind, as_training=True)
        if _has_entries(arranged.state, target) or not _has_entries(own, target):
            self._replace(arranged)

    def _replace(self, source: Source) -> None:
        self._reader.close()
        super().__init__(_SourceLeaves(source, self._reader.tuning))
        self.source = source

    @property
    def _misplaced(self) -> str | None:
        return None


def _has_entries(state: object, target: Mapping[Any, Any]) -> bool:
    return isinstance(state, dict) and target.keys() <= state.keys()


def _modified(path: str) -> float:
    with reading(path):
        return os.stat(path).st_mtime


class _Records:
    """The records of our format that describe a source."""

    def __init__(self, source: Source, max_inflation: float) -> None:
        self._source = source
        self.computed: dict[str, Computed] = {}
        self._files: list[ShardFile] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._created = _modified(source.path)
        self._known: dict[str, int] = {}
        self._leaves = self._describe_leaves(max_inflation)

    def root(self) -> Root:
        source = self._source
        leaves = tuple(self._leaves)
        aliases = tuple(Alias(name, of) for name, of in source.aliases.items())
        part = Part(0, CHUNK_NBYTES, tuple(self._files), leaves, aliases)
        problem = unmatched([source.tree], {leaf.name for leaf in leaves} | source.aliases.keys())
        if problem is not None:
            raise UnsupportedSource(f"{source.path}: {problem}. This is an error of Everystep's reader")
        return Root(
            format=source.kind,
            id=_identity(source, part),
            step=source.step or 0,
            created=self._created,
            tree=source.tree,
            part=part,
        )

    def _describe_leaves(self, max_inflation: float) -> list[Leaf]:
        taken: set[str] = set()
        plain: list[SourceLeaf] = []
        for leaf in self._source.leaves:
            self._check(leaf, taken)
            if leaf.computed is not None or leaf.terms:
                leaf = self._as_computed(leaf)
            plain.append(leaf)
        for name, of in self._source.aliases.items():
            if name in taken or of not in taken or is_own_name(name):
                raise UnsupportedSource(f"{self._source.path}: {name!r} cannot be another name of {of!r}")
        self._refuse_bomb(plain, max_inflation)
        lanes = iter(_lanes([place for leaf in plain for place in _in_bytes(leaf)]))
        return [self._leaf(leaf, lanes) for leaf in plain]

    def _refuse_bomb(self, leaves: Sequence[SourceLeaf], max_inflation: float) -> None:
        made, files = 0, set[str]()
        for leaf in leaves:
            computed = self.computed.get(leaf.fragments[0].file) if leaf.fragments else None
            origins = {fragment.file for fragment in leaf.fragments} if computed is None else computed.files
            files.update(origins)
            made += itemsize(leaf.dtype) * whole(leaf.shape).volume if origins else 0
        refuse_bomb(self._source.path, made, sum(map(self._nbytes, files)), max_inflation)

    def _check(self, leaf: SourceLeaf, taken: set[str]) -> None:
        where = self._source.path
        if leaf.name in taken or not leaf.name or is_own_name(leaf.name):
            why = "twice" if leaf.name in taken else "which is a name that Everystep needs for itself"
            raise UnsupportedSource(f"{where}: it has the leaf {leaf.name!r}, {why}")
        taken.add(leaf.name)
        if not is_known(leaf.dtype) and opaque(leaf.dtype) is None:
            raise UnsupportedSource(f"{where}: the leaf {leaf.name!r} has the unknown type {leaf.dtype!r}")
        held = sum(fragment.box.volume for fragment in leaf.fragments)
        if leaf.computed is None and held != whole(leaf.shape).volume:
            raise IncompleteCheckpoint(
                f"{whole(leaf.shape).volume - held} of its elements are nowhere", path=where, leaf=leaf.name
            )

    def _as_computed(self, leaf: SourceLeaf) -> SourceLeaf:
        """The leaf as a file of its own, which is made when it is read."""
        name = f"{self._source.path}:{leaf.name}"
        nbytes = itemsize(leaf.dtype) * whole(leaf.shape).volume
        self.computed[name] = leaf.computed or reduced(leaf)
        self._known[name] = nbytes
        return SourceLeaf(
            leaf.name,
            leaf.dtype,
            leaf.shape,
            (SourceFragment(name, 0, whole(leaf.shape)),),
            framework=leaf.framework,
        )

    def _leaf(self, leaf: SourceLeaf, lanes: Iterator[int]) -> Leaf:
        size = itemsize(leaf.dtype)
        fragments = [
            Fragment(
                fragment.box.start,
                fragment.box.shape,
                self._file(fragment.file, next(lanes)),
                fragment.offset,
                size * fragment.box.volume,
                "",
            )
            for fragment in leaf.fragments
            if fragment.box.volume
        ]
        if not fragments:
            fragments = [Fragment((0,) * len(leaf.shape), leaf.shape, 0, 0, 0, "")]
        for fragment in fragments:
            file = self._files[fragment.file] if fragment.nbytes else None
            if file is not None and fragment.offset + fragment.nbytes > file.nbytes:
                raise IncompleteCheckpoint(
                    f"the file has {file.nbytes} bytes, and should have at least "
                    f"{fragment.offset + fragment.nbytes}",
                    path=file.name,
                    leaf=leaf.name,
                )
        return Leaf(leaf.name, leaf.dtype, leaf.shape, leaf.framework, tuple(fragments))

    def _file(self, path: str, lane: int) -> int:
        """The number of a file. One with overlapping leaves is listed several times, once for each lane."""
        key = path, lane
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._files)
            self._files.append(ShardFile(path, self._nbytes(path), 0, _NO_CHECKSUM))
        return number

    def _nbytes(self, path: str) -> int:
        known = self._known.get(path)
        if known is None:
            try:
                with reading(path):
                    found = os.stat(path)
            except OSError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise IncompleteCheckpoint("the file is missing", path=path) from error
                raise
            known = self._known[path] = found.st_size
            self._created = max(self._created, found.st_mtime)
        return known


_Place = tuple[str, int, int]


def _in_bytes(leaf: SourceLeaf) -> Iterator[_Place]:
    size = itemsize(leaf.dtype)
    for fragment in leaf.fragments:
        if fragment.box.volume:
            yield fragment.file, fragment.offset, size * fragment.box.volume


def _lanes(places: Sequence[_Place]) -> list[int]:
    """A number for each place: places of one file and one number do not overlap. It is 0 as a rule.

    Readers take the bytes of a file for those of one leaf, but leaves that are views of one storage share
    them.
    """
    found = [0] * len(places)
    lanes: dict[str, list[tuple[int, int]]] = {}  # of each file a heap: where the lane ends, its number
    for number in sorted(range(len(places)), key=places.__getitem__):
        file, offset, nbytes = places[number]
        ends = lanes.setdefault(file, [])
        if ends and ends[0][0] <= offset:
            found[number] = ends[0][1]
            heapq.heapreplace(ends, (offset + nbytes, found[number]))
        else:
            found[number] = len(ends)
            heapq.heappush(ends, (offset + nbytes, found[number]))
    return found


def _identity(source: Source, part: Part) -> str:
    """Equal on all ranks that see the same checkpoint."""
    hashed = hashlib.blake2b(f"{source.kind} {source.step}".encode(), digest_size=16)
    for file in part.files:
        hashed.update(os.fsencode(f"{file.name}\0{file.nbytes}\0"))
    for leaf in part.leaves:
        hashed.update(f"{leaf.name}\0{leaf.dtype}\0{leaf.shape}\0".encode(errors="surrogateescape"))
    return hashed.hexdigest()
