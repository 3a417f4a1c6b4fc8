"""The commit of one checkpoint: each process writes its share, and one rename commits all of it.

For a checkpoint that is to appear at ``D`` in directory ``P`` (`everystep.store.commit.transaction` has the
steps on the file system, `everystep.store.commit.round` the messages):

1. The coordinator makes ``D.partial``, or renames a retired checkpoint to it. It tells the others the path
   and the identity of the directory (``open``), because a rank may find another directory at that path. It
   also puts a mark there, which ranks on other hosts look for: a rank that does not share the directory must
   not write to its own.
2. Every rank writes its share of the fragments into its own shards, on its volumes.
3. Every rank but the coordinator writes its part: what it wrote, with checksums.
4. Every rank syncs its shards, its part and their directories, and reports size and digest of its part
   (``done``). The coordinator's own part will be in the root manifest.
5. When all have reported, with the same plan and equal values, the coordinator writes the root manifest,
   which names every part by its digest, and syncs it and ``D.partial``.
6. It renames ``D.partial`` to ``D``. **This is the commit.** It syncs ``P`` and says ``end``.

One process alone is its own coordinator and says nothing. It syncs its shard together with the manifest. A
small state becomes one file: it is copied first, so that its checksums are known, and the manifest is in the
header.

A rank that fails says so instead of ``done``. A rank that dies is silent, and the coordinator abandons the
save after the time-out. Then nothing is committed, and ``D.partial`` is removed now or by the next writer. If
the coordinator dies, no rank can commit: what it had renamed is whole, and the next writer removes the rest.
Late writes of a rank that was abandoned do no harm: they go to the directory that it holds open, and no other
save ever uses that directory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from everystep import engine
from everystep.engine import Tuning, WriteJob, fs
from everystep.engine.fs import OpenDirectory, PendingFile
from everystep.errors import RankFailed, StorageMissing
from everystep.format.manifest import encode_root, part_name, part_ref
from everystep.format.records import Part, PartRef, Root
from everystep.plan import ShardPlan, arrange
from everystep.state import LeafSource, Node
from everystep.store.commit.info import CheckpointInfo, Seconds
from everystep.store.commit.manifest import one_file, part_of, require_complete
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.round import ALONE, Committed, Opened, Round, ShareWritten
from everystep.store.commit.shard_writer import ShardWriter
from everystep.store.commit.share import Share
from everystep.store.commit.transaction import Transaction
from everystep.store.commit.volumes import OutsideShards, is_marked
from everystep.store.names import MANIFEST, SHARD
from everystep.store.save_errors import as_failed_save

Agreement = Callable[[Sequence[ShareWritten]], None]
"""Raises `RanksDisagree` unless what all ranks have written, in the order of ranks, is one state."""

_IN_ROOT = PartRef(0, "", 0, "")
"""The coordinator's part is in the root: there is no file to refer to."""


class Commit:
    """One checkpoint to be committed by all processes of a `Round`. Each makes one of these, and runs it.

    `transaction` says where; only the coordinator enters it. `outside`: what to do about shards on volumes,
    if any rank has volumes or is on another host. `agreement`: how the coordinator checks the reports.
    """

    def __init__(
        self,
        transaction: Transaction,
        step: int,
        metrics: Mapping[str, float],
        tuning: Tuning,
        *,
        id: str | None = None,
        created: float | None = None,
        round: Round = ALONE,
        outside: OutsideShards | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.id = id or os.urandom(16).hex()
        self._transaction = transaction
        self._target = transaction.target
        self._step = step
        self._created = time.time() if created is None else created
        self._metrics = dict(metrics)
        self._tuning = tuning
        self._round = round
        self._outside = outside
        self._agreement = agreement
        self._is_open = False
        """Whether the other ranks know where to write."""
        self._write_seconds = self._sync_seconds = 0.0

    def run(
        self,
        share: Share,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        observer: SaveObserver | None = None,
    ) -> CheckpointInfo:
        """Returns when the checkpoint is durable. If it fails, it tells the others, cleans up and raises.

        `groups`: the leaves of the share in the order in which they are to leave memory.
        """
        began = time.perf_counter()
        groups = [share.leaves] if groups is None else groups
        lead = self._lead if self._round.rank == 0 else self._follow
        try:
            end = lead(share, groups, observer or SaveObserver())
        except BaseException as error:
            failed = as_failed_save(error, self._target)
            try:
                self._round.failed(failed, maybe_committed=self._transaction.published)
                if failed is not error:
                    raise failed from error
                raise
            finally:
                # The error's traceback has this frame: the two would keep each other, and the state, alive.
                del failed
        seconds = time.perf_counter() - began
        write, sync = self._write_seconds, self._sync_seconds
        return CheckpointInfo(
            path=self._target,
            step=self._step,
            id=self.id,
            created=self._created,
            metrics=self._metrics,
            leaves=end.leaves,
            nbytes=end.nbytes,
            stored_nbytes=end.stored_nbytes,
            seconds=seconds,
            phases=Seconds(write, sync, max(0.0, seconds - write - sync)),
        )

    # --- the coordinator's steps, which torch DCP's writer calls one by one

    def begin(self, nbytes: int | None = None) -> None:
        """Step 1, in an open transaction. `nbytes`: the size of this process's shards, if known."""
        transaction, tuning, outside = self._transaction, self._tuning, self._outside
        if nbytes is None or nbytes > tuning.small_nbytes or tuning.backend is not None:
            # May write a trial file, so it comes before there is anything to clean up.
            engine.choose_backend(transaction.parent, tuning.backend)
        if outside is not None:
            outside.find_dead(transaction)
        transaction.make()
        if outside is not None:
            outside.mark(transaction.directory)

    def root(
        self,
        tree: Node,
        part: Part,
        others: Sequence[PartRef] = (),
        *,
        world: int = 1,
        trees: Sequence[int] = (),
        layout: bytes = b"",
    ) -> Root:
        """The root manifest. `part` is the coordinator's own, `others` those of the other ranks.

        `trees`: the ranks whose parts have a tree of their own.
        """
        return Root(
            id=self.id,
            step=self._step,
            created=self._created,
            world=world,
            metrics=self._metrics,
            tree=tree,
            part=part,
            parts=tuple(others),
            trees=tuple(trees),
            layout=layout,
        )

    def finish(
        self,
        manifest: bytearray | None,
        names: Collection[str],
        unsynced: Sequence[WriteJob | PendingFile] | None = None,
        observer: SaveObserver | None = None,
    ) -> None:
        """Steps 5 and 6. `names`: all files in the directory. `manifest`: None if it is in one of them.

        `unsynced`: these files, if this process has written all and synced none.
        """
        transaction, outside = self._transaction, self._outside
        began = time.perf_counter()
        if transaction.recycle:
            transaction.keep_only(names)
        transaction.seal(
            manifest,
            unsynced or (),
            names=None if unsynced is None else names,
            unneeded=() if outside is None else outside.marks,
        )
        self._sync_seconds += time.perf_counter() - began
        if observer is not None:
            observer.committing()
        # As long as the replaced one is there, a save that comes after a crash knows of it.
        transaction.publish(None if outside is None else outside.forget_replaced)

    # --- the coordinator

    def _lead(
        self, share: Share, groups: Sequence[Sequence[LeafSource]], observer: SaveObserver
    ) -> Committed:
        outside, limit = self._outside, self._tuning.small_nbytes
        nbytes = sum([leaf.source.nbytes for leaf in share.leaves])
        with self._transaction as transaction:
            try:
                small = None
                if nbytes < limit and self._round.world == 1 and outside is None:
                    small = one_file(arrange(groups), self.root, share, limit)
                if small is None:
                    end = self._write(transaction, share, groups, observer)
                else:
                    self._write_one_file(transaction, *small, share, observer)
                    end = Committed(nbytes, small[0].nbytes, share.count)
            except BaseException as error:
                self._give_up(transaction, error)
                raise
        observer.committed()
        if outside is not None:
            outside.committed()
        return self._round.end(end)

    def _write_one_file(
        self,
        transaction: Transaction,
        plan: ShardPlan,
        packed: engine.Packed,
        share: Share,
        observer: SaveObserver,
    ) -> None:
        """Steps 1 to 6 of a small state."""
        _require_complete(share)
        # All has been copied: the sources are free before the file system is even asked.
        observer.writing([(plan, packed)])
        observer.written()
        self.begin(plan.nbytes)
        began, place = time.perf_counter(), transaction.directory.at(SHARD)
        with fs.write_file(place, plan.header, packed.data, recycle=transaction.recycle) as file:
            self._write_seconds = time.perf_counter() - began
            self.finish(None, (SHARD,), (file,), observer)

    def _write(
        self,
        transaction: Transaction,
        share: Share,
        groups: Sequence[Sequence[LeafSource]],
        observer: SaveObserver,
    ) -> Committed:
        """Steps 1 to 6."""
        round, outside = self._round, self._outside
        alone = round.world == 1 and outside is None
        transaction.refuse_existing()
        with self._writer(groups) as writer:
            self.begin(writer.stored_nbytes if alone else None)
            if round.world > 1:
                self._is_open = True
                round.open(self._opened(transaction))
            if outside is not None:
                outside.sweep(outside.dead)
            writer.start(transaction.directory, recycle=transaction.recycle)
            if round.world == 1 and not share.layout:  # a planned share was checked when it was planned
                _require_complete(share)  # while the engine writes
            writer.wait(observer)
            if not alone:
                writer.sync(transaction.directory)
            self._write_seconds, self._sync_seconds = writer.write_seconds, writer.sync_seconds
            shares = round.collect(share.written(_IN_ROOT, writer.names, writer.stored_nbytes))
            if self._agreement is not None:
                self._agreement(shares)
            root = self.root(
                share.tree,
                part_of(0, writer.files(), (), share.aliases, share.local),
                [written.ref for written in shares[1:]],
                world=round.world,
                trees=[written.ref.rank for written in shares[1:] if written.tree],
                layout=share.layout,
            )
            manifest = encode_root(root, writer.leaves())
            names = {MANIFEST, *(name for written in shares for name in written.files)}
            self.finish(manifest, names, writer.unsynced if alone else None, observer)
        return Committed(
            sum([written.nbytes for written in shares]),
            len(manifest) + sum([written.stored_nbytes for written in shares]),
            share.count,
            () if outside is None else outside.replaced,
        )

    def _give_up(self, transaction: Transaction, error: BaseException) -> None:
        """Tells the others that the save has failed. The transaction removes ``D.partial`` after this."""
        undone = transaction.names_certain and not transaction.published
        self._round.failed(as_failed_save(error, self._target), maybe_committed=not undone)
        if self._is_open and not isinstance(error, RankFailed):
            self._round.await_others()
        if self._outside is not None and undone:
            self._outside.failed(transaction)

    def _opened(self, transaction: Transaction) -> Opened:
        """Where the other ranks write."""
        where, found = os.fsencode(transaction.path), fs.identity(transaction.directory)
        dead = () if self._outside is None else tuple(self._outside.dead)
        return Opened(where, transaction.recycle, dead, socket.gethostname(), found)

    # --- the other ranks

    def _follow(
        self, share: Share, groups: Sequence[Sequence[LeafSource]], observer: SaveObserver
    ) -> Committed:
        round, outside = self._round, self._outside
        opened = round.open(None)
        try:
            # Held, so that a rank that was given up never writes into what others put in its place.
            with open_partial(os.fsdecode(opened.directory)) as directory, self._writer(groups) as writer:
                self._require_same(opened, directory)
                if outside is not None:
                    outside.sweep(opened.dead)
                writer.start(directory, recycle=opened.recycle)
                writer.wait(observer)
                part = part_of(
                    round.rank, writer.files(), writer.leaves(), share.aliases, share.local, share.tree
                )
                encoded = writer.sync(directory, part, recycle=opened.recycle)
        except BaseException as error:
            self._remove_own(last=False)
            if isinstance(error, FileNotFoundError):
                round.check()  # a coordinator that gave up has removed what this rank writes to
                if opened.host != socket.gethostname() and not os.path.isdir(opened.directory):
                    raise self._not_shared(opened) from error
            raise
        self._write_seconds, self._sync_seconds = writer.write_seconds, writer.sync_seconds
        try:
            files = (part_name(round.rank), *writer.names)
            stored_nbytes = writer.stored_nbytes + len(encoded)
            round.collect(share.written(part_ref(part, encoded), files, stored_nbytes))
            end = round.end(None)
        except BaseException:
            # Unless the coordinator has said that it failed, it may have been committed.
            if round.rejected:
                self._remove_own(last=True)
            raise
        if outside is not None:
            outside.sweep(end.dead)
        return end

    def _require_same(self, opened: Opened, directory: OpenDirectory) -> None:
        """The coordinator may have died, and another world may write under the same name. Or a host that does
        not share the directory may have an old one of that name."""
        host = socket.gethostname()
        if opened.host != host:
            if not is_marked(directory, self.id):
                raise self._not_shared(opened)
        elif fs.identity(directory) != opened.identity:
            raise RankFailed(
                f"the save of step {self._step} was abandoned: another save now writes to "
                f"{os.fsdecode(opened.directory)}. Nothing of this save is committed",
                ranks=(0,),
            )

    def _not_shared(self, opened: Opened) -> StorageMissing:
        where, host = os.fsdecode(opened.directory), socket.gethostname()
        return StorageMissing(
            f"cannot save {self._target}: {where} on {host} is not the directory that rank 0 has on "
            f"{opened.host}. All ranks must share this directory (only volumes may be node-local). Or "
            "rank 0 has abandoned this save"
        )

    # --- both

    def _writer(self, groups: Sequence[Sequence[LeafSource]]) -> ShardWriter:
        outside = () if self._outside is None else self._outside.directories()
        return ShardWriter(self._round.rank, groups, self._tuning, outside)

    def _remove_own(self, *, last: bool) -> None:
        if self._outside is not None:
            self._outside.remove_own(last=last)


def _require_complete(share: Share) -> None:
    names = {leaf.name for leaf in share.leaves}
    if share.aliases:
        names.update([name for name, _ in share.aliases])
    require_complete((share.tree, *share.local.values()), names)


@contextmanager
def open_partial(path: str) -> Iterator[OpenDirectory]:
    """Opens the coordinator's path. The caller checks that it is the same directory."""
    directory = fs.open_directory(path, False)
    try:
        yield directory
    finally:
        directory.release()
