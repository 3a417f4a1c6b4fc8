"""The commit protocol of several ranks: each writes its share, and one rename commits all of it.

For a checkpoint that shall appear at ``D`` in directory ``P`` (`holdfast.store.commit` is the same for one
process and one file; the messages are those of `holdfast.store.calls`):

1. The coordinator makes ``D.partial``, or renames a retired checkpoint to it, and tells where it is
   (``open``), and which directory that is: a rank may find another one there. Ranks on other hosts look for a
   mark that it has put there: one that does not share the directory must not write to its own.
2. Every rank writes the fragments that are its share into shards of its own, on its volumes.
3. Every rank but the coordinator writes its part: what it wrote, with checksums.
4. Every rank syncs its shards, its part, and the directories they are in, and says so with the size and
   digest of its part (``done``); the coordinator's own part will be in the root manifest.
5. When all have said so, by the same plan and with equal values, the coordinator writes the root manifest,
   which names every part by its digest, and syncs it and ``D.partial``.
6. It renames ``D.partial`` to ``D``. **This is the commit.** It syncs ``P``, and says ``end``.

A rank that fails says so instead of ``done``; one that dies is silent, and the coordinator gives up after the
time-out. Then nothing is committed, and ``D.partial`` is removed, or swept by the next writer. When the
coordinator dies, nobody can commit any more: what it had renamed is whole, and what not is swept. Late files
of a rank that was given up can do no harm: it holds the directory that it was told of, and nobody else ever
writes to that one once it has been given up.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast import engine
from holdfast.engine import Tuning, fs
from holdfast.engine.fs import HeldDirectory
from holdfast.errors import HoldfastError, RankFailed, RanksDisagree, StorageMissing
from holdfast.format.manifest import MANIFEST_NAME, encode_root, part_name, part_ref
from holdfast.format.records import Part, PartRef, Root
from holdfast.state import Flat, LeafSource
from holdfast.store import volumes
from holdfast.store.calls import Conversation, Done, End, Open
from holdfast.store.commit import CheckpointInfo, Seconds, check_step, publish, refuse_existing
from holdfast.store.directories import path_to_read
from holdfast.store.failures import save_failed
from holdfast.store.partial import Partial, Target
from holdfast.store.shares import Share
from holdfast.store.volumes import Ledger
from holdfast.store.watch import Watch
from holdfast.store.writing import Place, ShareWriter
from holdfast.team.replicas import check_samples
from holdfast.team.values import check_values


@dataclass(frozen=True, slots=True)
class Together:
    """One checkpoint to be committed by all ranks of a team; or, without a `talk`, by this process alone."""

    to: Target
    step: int
    id: str
    created: float
    metrics: Mapping[str, float]
    tuning: Tuning
    talk: Conversation | None = None
    rank: int = 0
    world: int = 1
    volumes: Sequence[str] = ()
    overwrite: bool = False
    ledger: Ledger | None = None
    """Of a run whose shards go to volumes, on the coordinator."""
    live: frozenset[str] | None = None
    """Of such a run: its checkpoints, whose shards stay. None: one cannot be told, so all shards do."""
    marked: bool = False
    """Whether ``D.partial`` names its saves: to ranks on other hosts, and to the next save to volumes."""

    @property
    def target(self) -> str:
        return self.to.path

    def run(
        self,
        flat: Flat,
        share: Share,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        watch: Watch | None = None,
    ) -> CheckpointInfo:
        """Returns when it is durable. Else raises, has told the others, and leaves nothing behind."""
        began = time.perf_counter()
        lead = self._lead if self.rank == 0 else self._follow
        try:
            check_step(self.step)
            sources = [share.fragments] if groups is None else groups
            return lead(flat, share, sources, watch or Watch(), began)
        except BaseException as error:
            failed = self._typed(error)
            if self.talk is not None:
                self.talk.failed(failed)
            if failed is not error:
                raise failed from error
            raise

    # --- the coordinator

    def _lead(
        self,
        flat: Flat,
        share: Share,
        groups: Sequence[Sequence[LeafSource]],
        watch: Watch,
        began: float,
    ) -> CheckpointInfo:
        with self.to.opened() as parent:
            return self._lead_in(parent, flat, share, groups, watch, began)

    def _lead_in(
        self,
        parent: HeldDirectory,
        flat: Flat,
        share: Share,
        groups: Sequence[Sequence[LeafSource]],
        watch: Watch,
        began: float,
    ) -> CheckpointInfo:
        partial = Partial(parent, self.target, self.to.spare)
        opened = publishing = False
        dead: frozenset[str] = frozenset()
        replaced: tuple[str, ...] = ()
        try:
            refuse_existing(self.target, overwrite=self.overwrite)
            fs.anchor(parent.path, once=True)
            # Choosing may write a trial file, so it comes before there is anything to clean up.
            engine.choose_backend(parent, self.tuning.backend)
            dead, replaced = self._dead(partial), self._replaced(partial)
            partial.make()
            marks = self._note(partial.directory, dead)
            if self.talk is not None:
                host, found = socket.gethostname(), fs.identity(partial.directory)
                where = os.fsencode(partial.path)
                self.talk.say("open", Open(where, partial.recycle, tuple(dead), host, found))
                opened = True
            volumes.sweep(self.volumes, self.target, dead)
            with ShareWriter(
                0, self._places(partial.directory), self.tuning, recycle=partial.recycle
            ) as writer:
                writer.write(groups, watch)
                part = writer.part(share.description)
                writer.sync(partial.directory)
            dones = [] if self.talk is None else self.talk.collect()
            _check(dones, share)
            root = self._root(flat, share, part, [done.ref for done in dones], dones)
            ours = {MANIFEST_NAME, *writer.names, *(name for done in dones for name in done.files)}
            partial.clear(ours)
            with fs.write_file(
                partial.directory.at(MANIFEST_NAME), root, recycle=partial.recycle
            ) as manifest:
                volumes.remove_marks(partial.directory, marks)
                fs.sync([manifest], partial.directory)
            watch.committing()
            publishing = True
            publish(
                partial,
                overwrite=self.overwrite,
                # As long as it is there, a save that comes after a crash knows of it.
                replaced=lambda: self._give_up(replaced),
            )
        except BaseException as error:
            if self.talk is not None:
                self.talk.failed(self._typed(error), open=not partial.settled)
                if opened and not publishing and not isinstance(error, RankFailed):
                    self.talk.await_others()
            if self.ledger is not None and partial.settled and _id_in(parent, self.target) != self.id:
                self.ledger.add([self.id])
            partial.remove()
            if not publishing:
                self._remove_from_volumes(last=True)
            raise
        finally:
            partial.release()
        watch.committed()
        if self.ledger is not None:
            self.ledger.write(self.ledger.read() - dead)
        end = End(
            sum(leaf.nbytes for leaf in share.fragments) + sum(done.nbytes for done in dones),
            writer.stored_nbytes + len(root) + sum(done.stored_nbytes for done in dones),
            len(share.plan.leaves),
            replaced,
        )
        if self.talk is not None:
            self.talk.committed(end)
        return self._info(end, writer, began)

    def _dead(self, partial: Partial) -> frozenset[str]:
        """Whose shards are to go before anything is written: they may take the room that is needed."""
        if self.ledger is None:
            return frozenset(volumes.left_behind(path_to_read(partial.parent, partial.entry.name)))
        return frozenset() if self.live is None else frozenset(self.ledger.read() - self.live)

    def _replaced(self, partial: Partial) -> tuple[str, ...]:
        """Whose shards are to go once this one is committed."""
        there = self.overwrite and fs.exists(partial.target_entry)
        found = _id_in(partial.parent, self.target) if there else None
        return () if found is None else (found,)

    def _give_up(self, replaced: tuple[str, ...]) -> None:
        """What has been replaced, for good, and is about to be removed."""
        if self.ledger is not None:
            self.ledger.add(replaced)
        volumes.sweep(self.volumes, self.target, replaced)

    def _note(self, partial: HeldDirectory, dead: frozenset[str]) -> frozenset[str]:
        """What is left of this save should it not come to its end, for the next one; the marks it made.

        A ledger gets to know of this save when that has failed, or by its mark: were it noted now, a kill
        behind the commit would leave a checkpoint that is taken for dead once it is moved out of its run.
        """
        marks = dead | {self.id}
        if self.ledger is not None:
            marks = frozenset([self.id])
            kept = self.ledger.read() if self.live is None else ()
            self.ledger.write({*dead, *kept})
        if not self.marked:
            return frozenset()
        volumes.mark(partial, marks)
        return marks

    def _root(
        self, flat: Flat, share: Share, part: Part, refs: Sequence[PartRef], dones: Sequence[Done]
    ) -> bytearray:
        return encode_root(
            Root(
                id=self.id,
                step=self.step,
                created=self.created,
                world=self.world,
                metrics=dict(self.metrics),
                tree=flat.tree,
                part=part,
                parts=tuple(refs),
                trees=tuple(done.ref.rank for done in dones if done.tree),
                layout=share.plan.layout,
            )
        )

    # --- everybody else

    def _follow(
        self,
        flat: Flat,
        share: Share,
        groups: Sequence[Sequence[LeafSource]],
        watch: Watch,
        began: float,
    ) -> CheckpointInfo:
        assert self.talk is not None
        opened = self.talk.read("open", Open)
        try:
            # Held, so that a rank that was given up never writes into what others put in its place.
            with open_partial(os.fsdecode(opened.directory)) as directory:
                self._require_same(opened, directory)
                volumes.sweep(self.volumes, self.target, opened.dead)
                places = self._places(directory)
                with ShareWriter(self.rank, places, self.tuning, recycle=opened.recycle) as writer:
                    writer.write(groups, watch)
                    part = writer.part(share.description)
                    encoded = writer.sync(directory, part)
        except BaseException as error:
            self._remove_from_volumes(last=False)
            if isinstance(error, FileNotFoundError):
                self.talk.check()  # a coordinator that gave up has removed what this rank writes to
                if opened.host != socket.gethostname() and not os.path.isdir(opened.directory):
                    raise self._not_shared(opened) from error
            raise
        try:
            self.talk.done(
                Done(
                    ref=part_ref(part, encoded),
                    files=(part_name(self.rank), *writer.names),
                    nbytes=sum(leaf.nbytes for leaf in share.fragments),
                    stored_nbytes=writer.stored_nbytes + len(encoded),
                    plan=share.plan.fingerprint,
                    tree=part.tree is not None,
                    values=share.values,
                    facts=share.facts,
                    samples=share.samples,
                )
            )
            end = self.talk.read("end", End)
        except BaseException:
            # As long as nobody says that it has failed, it may have been committed.
            if self.talk.refused:
                self._remove_from_volumes(last=True)
            raise
        volumes.sweep(self.volumes, self.target, end.dead)
        return self._info(end, writer, began)

    def _require_same(self, opened: Open, directory: HeldDirectory) -> None:
        """By now the coordinator may be dead, and another world at work under the same name. And a host that
        does not share the directory may have one of that name left over."""
        host = socket.gethostname()
        if opened.host != host:
            if not volumes.is_marked(directory, self.id):
                raise self._not_shared(opened)
        elif fs.identity(directory) != opened.identity:
            raise RankFailed(
                f"the save of step {self.step} was given up: another one has taken its place at "
                f"{os.fsdecode(opened.directory)} meanwhile",
                ranks=(0,),
            )

    def _not_shared(self, opened: Open) -> StorageMissing:
        where, host = os.fsdecode(opened.directory), socket.gethostname()
        return StorageMissing(
            f"cannot save {self.target}: what {host} has at {where} is not what rank 0 has there on "
            f"{opened.host}. All ranks must share this directory (only volumes may be each node's own); or "
            "the save was given up meanwhile"
        )

    # --- both

    def _typed(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and not isinstance(error, HoldfastError):
            return save_failed(error, self.target)
        return error

    def _places(self, directory: HeldDirectory) -> list[Place]:
        return volumes.places(self.volumes, self.target, self.id) if self.volumes else [Place(directory)]

    def _remove_from_volumes(self, *, last: bool) -> None:
        for volume in self.volumes:
            directory = os.path.join(volume, volumes.home(self.target), self.id)
            volumes.remove_files_of(directory, self.rank, last=last)

    def _info(self, end: End, writer: ShareWriter, began: float) -> CheckpointInfo:
        seconds = time.perf_counter() - began
        commit = max(0.0, seconds - writer.write_seconds - writer.sync_seconds)
        return CheckpointInfo(
            path=self.target,
            step=self.step,
            id=self.id,
            created=self.created,
            metrics=dict(self.metrics),
            leaves=end.leaves,
            nbytes=end.nbytes,
            stored_nbytes=end.stored_nbytes,
            seconds=seconds,
            phases=Seconds(writer.write_seconds, writer.sync_seconds, commit),
        )


@contextmanager
def open_partial(path: str) -> Iterator[HeldDirectory]:
    """What is at the path that the coordinator has told of, be it what it has told of or not."""
    directory = fs.open_directory(path, False)
    try:
        yield directory
    finally:
        directory.release()


def _id_in(directory: HeldDirectory, target: str) -> str | None:
    return volumes.id_at(path_to_read(directory, os.path.basename(target)))


def _check(dones: Sequence[Done], share: Share) -> None:
    for done in dones:
        if done.plan != share.plan.fingerprint:
            raise RanksDisagree(
                f"rank {done.ref.rank} wrote by another plan than rank 0; the next save plans anew",
                ranks=(0, done.ref.rank),
            )
    values = {0: share.values, **{done.ref.rank: done.values for done in dones}}
    facts = {0: share.facts, **{done.ref.rank: done.facts for done in dones}}
    check_values(values, facts, share.plan.speakers)
    check_samples({0: share.samples, **{done.ref.rank: done.samples for done in dones}})
