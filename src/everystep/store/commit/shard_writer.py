"""The shards that one process writes, one per volume, and the part that describes them.

Owns the way of the bytes: out of memory into files, their checksums into records, and the sync.
`everystep.store.ranks.write_shares` decides before which rank writes what.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType

from everystep import engine
from everystep.engine import Tuning, WriteJob, fs
from everystep.engine.fs import OpenDirectory
from everystep.format.checksums import digest
from everystep.format.manifest import encode_part, part_name, shard_name
from everystep.format.records import Leaf, Part, ShardFile
from everystep.plan import ShardPlan, arrange
from everystep.state import LeafSource
from everystep.store.commit.manifest import leaf_records
from everystep.store.commit.observer import SaveObserver
from everystep.store.locks import require_current


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """The shards of one process, from their plan to the sync. Leaving the block lets go of all memory.

    Its order: `start`, `wait`, then `files` and `leaves` for the manifest, and `sync`.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[Sequence[LeafSource]],
        tuning: Tuning,
        outside: Sequence[str] = (),
    ) -> None:
        """`groups`: the leaves in the order in which they are to leave memory. `outside`: directories on
        volumes, which are made when there is something to write; without any, shards are in the
        checkpoint's own directory."""
        self._rank = rank
        self._tuning = tuning
        self._outside = outside
        self._plans: dict[int, ShardPlan] = {}
        for volume in range(max(1, len(outside))):
            mine = (
                [[leaf for leaf in group if _volume(leaf) == volume] for group in groups]
                if outside
                else groups
            )
            if any(mine):
                self._plans[volume] = arrange(mine).plan()
        self._jobs: list[WriteJob] = []
        self._opened: list[OpenDirectory] = []
        self.write_seconds = 0.0
        self.sync_seconds = 0.0

    @property
    def stored_nbytes(self) -> int:
        return sum([plan.nbytes for plan in self._plans.values()])

    def start(self, directory: OpenDirectory, *, recycle: bool) -> None:
        """Begins to write all shards. `recycle`: over files in the checkpoint's directory."""
        began = time.perf_counter()
        tuning = self._tuning
        if len(self._outside) > 1:  # all jobs together take no more memory than one would
            tuning = replace(tuning, depth=max(2, tuning.depth // len(self._outside)))
        for volume, plan in self._plans.items():
            place = self._open(self._outside[volume]) if self._outside else directory
            small = plan.nbytes <= tuning.small_nbytes
            if not small or tuning.backend is not None:
                tuning = replace(tuning, backend=engine.choose_backend(place, self._tuning.backend))
            self._jobs.append(
                engine.write(
                    place.at(shard_name(self._rank, volume)),
                    plan.nbytes,
                    plan.pieces(),
                    tuning=tuning,
                    header=plan.header,
                    recycle=recycle and not self._outside,
                    background=not small,
                )
            )
        self.write_seconds = time.perf_counter() - began

    def wait(self, observer: SaveObserver) -> None:
        """Returns when all bytes have left memory."""
        began = time.perf_counter()
        observer.writing(list(zip(self._plans.values(), self._jobs, strict=True)))
        done = 0

        def advanced(nbytes: int) -> None:
            observer.advanced(done + nbytes)

        for plan, job in zip(self._plans.values(), self._jobs, strict=True):
            job.wait(progress=advanced)
            done += plan.nbytes
        observer.written()
        self.write_seconds += time.perf_counter() - began

    def _open(self, path: str) -> OpenDirectory:
        fs.make_directories(path)
        self._opened.append(fs.open_directory(path))
        return self._opened[-1]

    def files(self) -> list[ShardFile]:
        """The records of the shards."""
        host = socket.gethostname() if self._outside else None
        return [
            ShardFile(
                shard_name(self._rank, volume),
                plan.nbytes,
                len(plan.header),
                digest(plan.header),
                self._outside[volume] if self._outside else None,
                host,
            )
            for volume, plan in self._plans.items()
        ]

    def leaves(self) -> Iterator[Leaf]:
        """The records of what is in the shards."""
        plans = zip(self._plans.values(), self._jobs, strict=True)
        return leaf_records((plan.leaves, plan.offsets, job.checksums()) for plan, job in plans)

    @property
    def names(self) -> list[str]:
        """The files in the checkpoint's own directory."""
        return [] if self._outside else [shard_name(self._rank, volume) for volume in self._plans]

    @property
    def unsynced(self) -> Sequence[WriteJob]:
        """What the caller may sync together with other files, instead of calling `sync`."""
        return self._jobs

    def sync(self, directory: OpenDirectory, part: Part | None = None, *, recycle: bool = False) -> bytearray:
        """Makes all that was written durable, and the file of the part if one is given; its bytes."""
        began = time.perf_counter()
        encoded = bytearray() if part is None else encode_part(part)
        if part is None:
            fs.sync(self._jobs, directory)
        else:
            with fs.write_file(directory.at(part_name(self._rank)), encoded, recycle=recycle) as file:
                fs.sync([*self._jobs, file], directory)
        for outside in self._opened:
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
            for job in self._jobs:
                job.abandon()  # the engine must not go on reading memory that the caller goes on to change
        for outside in self._opened:
            outside.release()


def _volume(leaf: LeafSource) -> int:
    return 0 if leaf.fragment is None else leaf.fragment.volume
