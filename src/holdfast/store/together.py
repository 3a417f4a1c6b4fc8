"""The commit protocol of several ranks: each writes its share, and one rename commits all of it.

For a checkpoint that shall appear at ``D`` in directory ``P`` (`holdfast.store.commit` is the same for one
process and one file; the messages are those of `holdfast.store.calls`):

1. The coordinator makes ``D.partial``, or renames a retired checkpoint to it, and tells where it is
   (``open``).
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast import engine
from holdfast.engine import Tuning, fs
from holdfast.errors import HoldfastError, RankFailed, RanksDisagree
from holdfast.format.manifest import MANIFEST_NAME, encode_root, part_name, part_ref
from holdfast.format.records import Part, PartRef, Root
from holdfast.state import Flat, LeafSource
from holdfast.store import volumes
from holdfast.store.calls import Conversation, Done, End, Open
from holdfast.store.commit import CheckpointInfo, Seconds, check_step, publish, refuse_existing
from holdfast.store.directories import held_directory
from holdfast.store.failures import save_failed
from holdfast.store.partial import PARTIAL, Partial, Spare
from holdfast.store.run import is_step_name
from holdfast.store.shares import Share
from holdfast.store.watch import Watch
from holdfast.store.writing import Place, ShareWriter
from holdfast.team.replicas import check_samples
from holdfast.team.values import check_values


@dataclass(frozen=True, slots=True)
class Together:
    """One checkpoint to be committed by all ranks of a team; or, without a `talk`, by this process alone."""

    target: str
    step: int
    id: str
    created: float
    metrics: Mapping[str, float]
    tuning: Tuning
    talk: Conversation | None = None
    rank: int = 0
    world: int = 1
    volumes: Sequence[str] = ()
    spare: Spare | None = None
    overwrite: bool = False
    live: tuple[str, ...] | None = None
    """Of a run: the checkpoints whose shards on volumes are to stay. None: nothing is swept."""
    sweeps: bool = False
    """Whether this rank is the one of its node that sweeps."""

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
        partial = Partial(self.target, self.spare, self.target + PARTIAL)
        parent = os.path.dirname(self.target)
        opened = publishing = False
        try:
            refuse_existing(self.target, overwrite=self.overwrite)
            fs.anchor(parent, once=True)
            # Choosing may write a trial file, so it comes before there is anything to clean up.
            engine.choose_backend(parent, self.tuning.backend)
            partial.make()
            if self.talk is not None:
                host, found = socket.gethostname(), fs.identity(partial.path)
                self.talk.say("open", Open(partial.path, partial.recycle, self.live, host, found))
                opened = True
            self._sweep(self.live)
            with ShareWriter(0, self._places(partial.path), self.tuning, recycle=partial.recycle) as writer:
                writer.write(groups, watch)
                part = writer.part(share.description)
                writer.sync(partial.path)
            dones = [] if self.talk is None else self.talk.collect()
            _check(dones, share)
            root = self._root(flat, share, part, [done.ref for done in dones], dones)
            ours = {MANIFEST_NAME, *writer.names, *(name for done in dones for name in done.files)}
            partial.directory_to_sync(ours)
            manifest = fs.write_file(os.path.join(partial.path, MANIFEST_NAME), root, recycle=partial.recycle)
            fs.sync([manifest], partial.path)
            watch.committing()
            publishing = True
            publish(partial, self.target, overwrite=self.overwrite)
        except BaseException as error:
            if self.talk is not None:
                self.talk.failed(self._typed(error), open=not partial.settled)
                if opened and not publishing and not isinstance(error, RankFailed):
                    self.talk.await_others()
            partial.remove()
            if not publishing:
                self._remove_from_volumes(last=True)
            raise
        finally:
            partial.release()
        end = End(
            self.target,
            sum(leaf.nbytes for leaf in share.fragments) + sum(done.nbytes for done in dones),
            writer.stored_nbytes + len(root) + sum(done.stored_nbytes for done in dones),
            len(share.plan.leaves),
        )
        if self.talk is not None:
            self.talk.committed(end)
        self._sweep_replaced()
        return self._info(end, writer, began)

    def _root(
        self, flat: Flat, share: Share, part: Part, refs: Sequence[PartRef], dones: Sequence[Done]
    ) -> bytes:
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
            with held_directory(opened.directory) as directory:
                self._require_same(opened, directory)
                self._sweep(opened.live)
                places = self._places(directory)
                with ShareWriter(self.rank, places, self.tuning, recycle=opened.recycle) as writer:
                    writer.write(groups, watch)
                    part = writer.part(share.description)
                    encoded = writer.sync(directory, part)
        except BaseException as error:
            self._remove_from_volumes(last=False)
            if isinstance(error, FileNotFoundError):
                self.talk.check()  # a coordinator that gave up has removed what this rank writes to
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
        self._sweep_replaced()
        return self._info(end, writer, began)

    def _require_same(self, opened: Open, directory: str) -> None:
        """By now the coordinator may be dead, and another world at work under the same name."""
        if opened.host == socket.gethostname() and fs.identity(directory) != opened.identity:
            raise RankFailed(
                f"the save of step {self.step} was given up: another one has taken its place at "
                f"{opened.directory} meanwhile",
                ranks=(0,),
            )

    # --- both

    def _typed(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and not isinstance(error, HoldfastError):
            return save_failed(error, self.target)
        return error

    def _places(self, directory: str) -> list[Place]:
        return volumes.places(self.volumes, self.target, self.id) if self.volumes else [Place(directory)]

    def _sweep(self, live: Sequence[str] | None) -> None:
        """In a run before anything is written: what a failed save left may be what there is no room for."""
        if self.volumes and self.sweeps and live is not None:
            volumes.sweep(self.volumes, self.target, {*live, self.id})

    def _sweep_replaced(self) -> None:
        """Of a checkpoint outside of a run, only the newest is there."""
        if not is_step_name(os.path.basename(self.target)):
            self._sweep(())

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
