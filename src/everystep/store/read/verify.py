"""The full check of a checkpoint: every byte of every file, and that they agree with each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from everystep.engine import Unkept
from everystep.errors import CorruptCheckpoint, OutOfResources, ReadFailed
from everystep.format.dtypes import carrier
from everystep.format.records import Part, ShardFile
from everystep.format.shard import HeaderEntry, entry_name, is_pad, parse_header
from everystep.store.names import MANIFEST
from everystep.store.options import Options, reading_tuning
from everystep.store.read import foreign
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint
from everystep.store.read.consistency import check_agreement, problems_of_part, problems_of_whole
from everystep.store.read.listing import is_checkpoint
from everystep.store.read.open import resolve
from everystep.store.read.parts import Parts
from everystep.store.read.read_errors import open_stored, reading, shows_damage
from everystep.store.read.shard_reader import VerifyProblem, after, request_fragment


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The checkpoint.
        step: Its step; None if that cannot be read.
        leaves: How many leaves it has; 0 if they cannot all be read.
        nbytes: Bytes of the shards.
        problems: Everything that is wrong.
        strangers: Names of files that do not belong there. They do no harm.
        files: How many files were checked: shards, and the manifest's.
        instead: What was checked of a checkpoint of another system, which has no checksums; empty for one of
            ours, of which every byte was checked.
    """

    path: str
    step: int | None
    leaves: int
    nbytes: int
    problems: tuple[VerifyProblem, ...]
    strangers: tuple[str, ...] = ()
    files: int = 0
    instead: str = ""

    @property
    def intact(self) -> bool:
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    options: Options | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check every byte of a checkpoint. Damage is reported, not raised.

    A path with nothing at it raises `CheckpointNotFound`, and a lack of descriptors or memory raises
    `OutOfResources`. Of a checkpoint of another system, what its format allows is checked; the report says
    what that was.

    Args:
        path: A checkpoint, a run (its newest is checked), or ``RUN@STEP``.
        options: How to read, as for `load`.
        progress: Called with the number of bytes checked so far.
    """
    tuning = reading_tuning(options)
    where = resolve(path)
    if not is_checkpoint(where) and foreign.recognises(where):
        found: VerifyReport = foreign.check(where, progress, tuning)
        return found
    try:
        checkpoint = open_checkpoint(where, tuning)
    except OutOfResources:
        raise
    except (CorruptCheckpoint, ReadFailed) as error:
        file = getattr(error, "path", None) or getattr(error, "filename", None) or where
        return VerifyReport(where, None, 0, 0, (VerifyProblem(file, getattr(error, "reason", str(error))),))
    with checkpoint:
        parts = checkpoint._parts
        problems: list[VerifyProblem] = []
        files = _Files(checkpoint)
        done = 0
        for rank in parts.ranks:
            problems += files.check(rank, after(done, progress))
            done = files.nbytes
        if not problems:
            problems += _disagreements(parts)
            files.unreadable |= bool(problems)
        if checkpoint._misplaced is not None:
            problems.append(VerifyProblem(parts.manifest_path, checkpoint._misplaced))
        strangers = tuple(sorted(set(files.inside()) - files.names))
        leaves = 0 if files.unreadable else len(checkpoint)
        every = tuple(dict.fromkeys(problems))
        return VerifyReport(where, checkpoint.step, leaves, files.nbytes, every, strangers, files.number)


def visible_damage(checkpoint: Checkpoint, *, far: bool = True) -> VerifyProblem | None:
    """The damage that shows without reading arrays: a part or shard that is missing or has the wrong size.

    `far`: shards on volumes of other hosts that cannot be reached from here count as damaged. Raises
    `ReadFailed` if the files cannot be examined.
    """
    parts = checkpoint._parts
    if checkpoint._misplaced is not None:
        return VerifyProblem(parts.manifest_path, checkpoint._misplaced)
    for rank in parts.ranks:
        try:
            parts[rank]
        except (CorruptCheckpoint, ReadFailed) as error:
            if not shows_damage(error):
                raise
            file = getattr(error, "path", None) or parts.file_of(rank)
            return VerifyProblem(file, getattr(error, "reason", str(error)))
        problem = checkpoint._reader.shards(rank).visible_damage(far=far)
        if problem is not None:
            return problem
    return None


class _Files:
    """The files of a checkpoint, checked rank by rank."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._parts = checkpoint._parts
        self._reader = checkpoint._reader
        self._directory = checkpoint._reader.hold.directory
        manifest, refs = os.path.basename(self._parts.manifest_path), self._parts.root.parts
        self.names = {manifest, *(ref.file for ref in refs)}
        self.nbytes = 0
        self.number = len(refs) + (manifest == MANIFEST)
        self.unreadable = False

    def inside(self) -> list[str]:
        """The names in the directory, even if retention has renamed it; none if retention has removed it."""
        with reading(self._parts.path):
            return os.listdir(self._directory)

    def check(self, rank: int, progress: Callable[[int], None] | None) -> list[VerifyProblem]:
        try:
            part = self._parts[rank]
        except OutOfResources:
            raise
        except (CorruptCheckpoint, ReadFailed) as error:
            self.unreadable = True
            self.names.update(name for name in self.inside() if _is_shard_of(name, rank))
            own = self._parts.file_of(rank)
            return [VerifyProblem(getattr(error, "path", None) or own, getattr(error, "reason", str(error)))]
        self.names.update(file.name for file in part.files if file.volume is None)
        self.number += len(part.files)
        self.nbytes += sum(file.nbytes for file in part.files)
        reader = self._reader.shards(rank)
        requests = [
            request_fragment(leaf.name, fragment, Unkept(fragment.nbytes))
            for leaf in part.leaves
            for fragment in leaf.fragments
        ]
        try:
            problems = reader.problems(requests, verify=True, whole=True, progress=progress)
        except OutOfResources:
            raise
        except ReadFailed as error:
            problems = [VerifyProblem(os.fsdecode(error.filename), str(error))]
        except CorruptCheckpoint as error:
            problems = [VerifyProblem(error.path or self._parts.path, error.reason, error.leaf)]
        damaged = {problem.file for problem in problems if problem.leaf is None}
        for index, file in enumerate(part.files):
            shown = reader.shown_path(file)
            if shown not in damaged and os.path.exists(reader.path(file)):
                problems += _header_problems(part, index, file, reader.path(file), shown)
        return problems + problems_of_part(self._parts, part)


def _is_shard_of(name: str, rank: int) -> bool:
    return name.startswith(f"r{rank:05d}.v") and name.endswith(".safetensors")


def _disagreements(parts: Parts) -> list[VerifyProblem]:
    """Problems that show only with all parts: whether they fit together, and hold every leaf once."""
    try:
        check_agreement(parts)
        return problems_of_whole(parts)
    except CorruptCheckpoint as error:
        return [VerifyProblem(error.path or parts.manifest_path, error.reason, error.leaf)]


def _header_problems(part: Part, index: int, file: ShardFile, path: str, shown: str) -> list[VerifyProblem]:
    """What safetensors readers see must be what the manifest says."""
    try:
        with reading(shown), open_stored(path, shown) as opened:
            header = parse_header(opened.read(file.header_nbytes), file.nbytes, shown)
    except OutOfResources:
        raise
    except (CorruptCheckpoint, ReadFailed) as error:
        return [VerifyProblem(shown, getattr(error, "reason", str(error)))]
    expected: set[HeaderEntry] = set()
    leaf_of: dict[str, str] = {}
    for leaf in part.leaves:
        fragments = [fragment for fragment in leaf.fragments if fragment.file == index]
        stored = carrier(leaf.dtype)
        # The writer numbers entries in the order in which it comes to the fragments: any order is right.
        leaf_of.update((entry_name(leaf.name, number), leaf.name) for number in range(len(fragments)))
        expected.update(
            HeaderEntry(
                leaf.name,
                stored.name,
                (*fragment.shape, *stored.tail),
                fragment.offset - file.header_nbytes,
                fragment.offset - file.header_nbytes + fragment.nbytes,
            )
            for fragment in fragments
        )
    present = {
        msgspec.structs.replace(entry, name=leaf_of.get(entry.name, f"entry {entry.name}"))
        for entry in header.entries
        if not is_pad(entry.name)
    }
    return [
        VerifyProblem(shown, "the shard's header and the manifest describe this leaf differently", name)
        for name in sorted({entry.name for entry in expected ^ present})
    ]
