"""What one rank writes of a checkpoint: its shards, one per volume, and the part that describes them.

Owns one rank's work in steps 2 to 4 of the commit protocol (`everystep.store.ranks.coordinated`): it moves
the bytes out of memory, puts the checksums into records, and syncs everything.
`everystep.store.ranks.write_shares` decides before which rank writes what.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from everystep import engine
from everystep.engine import Tuning, WriteJob, fs
from everystep.engine.fs import OpenDirectory
from everystep.format.checksums import digest
from everystep.format.manifest import encode_part, part_name, shard_name
from everystep.format.records import Fragment, Leaf, Part, ShardFile
from everystep.plan import ShardPlan, arrange
from everystep.state import LeafSource
from everystep.store.commit.manifest import part_of
from everystep.store.commit.observer import SaveObserver
from everystep.store.locks import require_current


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Where the shard of a volume goes: an open `directory`, the checkpoint's; or the one outside of it that
    `volume` is the path of, on `host`, which is made when there is something to write."""

    directory: OpenDirectory | None
    volume: str | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What a part says beside its leaves."""

    aliases: tuple[tuple[str, str], ...] = ()
    local: Mapping[str, Any] | None = None
    tree: Any = None


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """The files of one rank, from their first byte to the sync. Leaving the block lets go of all memory."""

    def __init__(self, rank: int, places: Sequence[ShardLocation], tuning: Tuning, *, recycle: bool) -> None:
        self._rank = rank
        self._places = places
        self._tuning = tuning
        self._recycle = recycle
        self._files: list[tuple[int, ShardPlan, WriteJob]] = []
        self._outside: list[OpenDirectory] = []
        """Those on volumes that it writes to."""
        self.write_seconds = 0.0
        self.sync_seconds = 0.0

    def write(self, groups: Sequence[Sequence[LeafSource]], observer: SaveObserver) -> None:
        """Writes the fragments, group by group; returns when all have left memory."""
        began = time.perf_counter()
        # All jobs together take no more memory than one would.
        depth = max(2, self._tuning.depth // max(1, len(self._places)))
        for volume, place in enumerate(self._places):
            mine = [[leaf for leaf in group if _volume(leaf) == volume] for group in groups]
            if not any(mine):
                continue
            plan = arrange(mine).plan()
            directory = self._directory(place)
            backend = engine.choose_backend(directory, self._tuning.backend)
            job = engine.write(
                directory.at(shard_name(self._rank, volume)),
                plan.nbytes,
                plan.pieces(),
                tuning=replace(self._tuning, backend=backend, depth=depth),
                header=plan.header,
                recycle=self._recycle and place.volume is None,
                background=plan.nbytes > self._tuning.small_nbytes,
            )
            self._files.append((volume, plan, job))
        observer.writing([(plan, job) for _, plan, job in self._files])
        done = 0

        def advanced(nbytes: int) -> None:
            observer.advanced(done + nbytes)

        for _, plan, job in self._files:
            job.wait(progress=advanced)
            done += plan.nbytes
        observer.written()
        self.write_seconds += time.perf_counter() - began

    def _directory(self, place: ShardLocation) -> OpenDirectory:
        if place.directory is not None:
            return place.directory
        assert place.volume is not None
        fs.make_directories(place.volume)
        self._outside.append(fs.open_directory(place.volume))
        return self._outside[-1]

    def part(self, description: Description) -> Part:
        """The record of what was written."""
        files: list[ShardFile] = []
        leaves: dict[str, tuple[LeafSource, list[Fragment]]] = {}
        for number, (volume, plan, job) in enumerate(self._files):
            place = self._places[volume]
            files.append(
                ShardFile(
                    shard_name(self._rank, volume),
                    plan.nbytes,
                    len(plan.header),
                    digest(plan.header),
                    place.volume,
                    place.host,
                )
            )
            for leaf, offset, chunks in zip(plan.leaves, plan.offsets, job.checksums(), strict=True):
                start = (0,) * len(leaf.shape) if leaf.fragment is None else leaf.fragment.start
                fragment = Fragment(start, leaf.shape, number, offset, leaf.nbytes, chunks)
                leaves.setdefault(leaf.name, (leaf, []))[1].append(fragment)
        described = [
            Leaf(name, leaf.dtype, leaf.whole_shape, leaf.framework, tuple(fragments))
            for name, (leaf, fragments) in leaves.items()
        ]
        return part_of(self._rank, files, described, description.aliases, description.local, description.tree)

    @property
    def stored_nbytes(self) -> int:
        return sum(plan.nbytes for _, plan, _ in self._files)

    @property
    def names(self) -> list[str]:
        """The files in the checkpoint's own directory."""
        return [
            shard_name(self._rank, volume) for volume, _, _ in self._files if not self._places[volume].volume
        ]

    def sync(self, directory: OpenDirectory, part: Part | None = None) -> bytearray:
        """Makes all that was written durable, and the file of the part if one is given; its bytes."""
        began = time.perf_counter()
        encoded = bytearray() if part is None else encode_part(part)
        written: list[WriteJob | fs.PendingFile] = [job for _, _, job in self._files]
        if part is None:
            fs.sync(written, directory)
        else:
            place = directory.at(part_name(self._rank))
            with fs.write_file(place, encoded, recycle=self._recycle) as file:
                fs.sync([*written, file], directory)
        for outside in self._outside:
            # The file's name; those of the directories are durable already.
            fs.sync_dir(outside)
            # The manifest will say that it is there.
            require_current(outside)
        self.sync_seconds += time.perf_counter() - began
        return encoded

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for _, _, job in self._files:
                job.abandon()  # the engine must not go on reading memory that the caller goes on to change
        for outside in self._outside:
            outside.release()


def _volume(leaf: LeafSource) -> int:
    return 0 if leaf.fragment is None else leaf.fragment.volume
