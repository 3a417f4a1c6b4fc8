"""The commit protocol of several ranks: each writes its share, and one rename commits all of it.

For a checkpoint that is to appear at ``D`` in directory ``P`` (`everystep.store.commit.single` is the driver
for one process and one file; `everystep.store.ranks.save_round` has the messages):

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from everystep import engine
from everystep.engine import Tuning, fs
from everystep.engine.fs import OpenDirectory
from everystep.errors import EverystepError, RankFailed, StorageMissing, as_save_failure
from everystep.format.manifest import encode_root, part_name, part_ref
from everystep.format.records import Part, PartRef
from everystep.state import Flat, LeafSource
from everystep.store.commit import volumes
from everystep.store.commit.info import CheckpointInfo, Seconds, check_step
from everystep.store.commit.manifest import Identity, root_of
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.round import ALONE, Committed, Opened, Round, ShareWritten
from everystep.store.commit.shard_writer import Description, ShardLocation, ShardWriter
from everystep.store.commit.transaction import Target, Transaction
from everystep.store.commit.volumes import Ledger
from everystep.store.locks import path_to_read
from everystep.store.names import MANIFEST, SAVE_MARK
from everystep.store.save_errors import save_failed


@dataclass(frozen=True, slots=True)
class WriteShare:
    """What this rank writes of one state, and what it tells of it to the coordinator."""

    fragments: tuple[LeafSource, ...]
    description: Description
    plan: str
    """The fingerprint of the plan that says who writes what."""
    layout: bytes
    """That plan, as it is stored."""
    leaves: int
    """Of the whole state."""
    whole_nbytes: int
    """Of the whole state: what all ranks write."""
    values: Mapping[str, str]
    """Digests of its plain values, by place."""
    facts: Mapping[str, str]
    """Digests of all of them, where trees of different structures are stored and this is one of them."""
    samples: Mapping[str, str]
    """Digests of samples of what others hold, too."""

    def done(
        self, ref: PartRef, files: Sequence[str] = (), stored_nbytes: int = 0, *, tree: bool
    ) -> ShareWritten:
        """That this share is durable."""
        nbytes = sum(leaf.nbytes for leaf in self.fragments)
        return ShareWritten(
            ref, tuple(files), nbytes, stored_nbytes, self.plan, tree, self.values, self.facts, self.samples
        )


Agreement = Callable[[Sequence[ShareWritten]], None]
"""Raises `RanksDisagree` unless what all ranks have written, in the order of ranks, is one state."""


@dataclass(frozen=True, slots=True)
class CoordinatedCommit:
    """One checkpoint to be committed by all ranks of a round."""

    to: Target
    identity: Identity
    tuning: Tuning
    agreement: Agreement
    round: Round = ALONE
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
        share: WriteShare,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        observer: SaveObserver | None = None,
    ) -> CheckpointInfo:
        """Returns when the checkpoint is durable. If it fails, it tells the others, cleans up and raises."""
        began = time.perf_counter()
        lead = self._lead if self.round.rank == 0 else self._follow
        try:
            check_step(self.identity.step)
            sources = [share.fragments] if groups is None else groups
            return lead(flat, share, sources, observer or SaveObserver(), began)
        except BaseException as error:
            failed = self._typed(error)
            self.round.failed(failed)
            if failed is not error:
                raise failed from error
            raise

    # --- the coordinator

    def _lead(
        self,
        flat: Flat,
        share: WriteShare,
        groups: Sequence[Sequence[LeafSource]],
        observer: SaveObserver,
        began: float,
    ) -> CheckpointInfo:
        with Transaction.begin(self.to, overwrite=self.overwrite) as transaction:
            try:
                transaction.refuse_existing()
                # Choosing may write a trial file, so it comes before there is anything to clean up.
                engine.choose_backend(transaction.parent, self.tuning.backend)
                dead, replaced = self._dead(transaction), self._replaced(transaction)
                transaction.make()
                marks = self._note(transaction.directory, dead)
                self.round.open(self._opened(transaction, dead))
            except BaseException as error:
                self._lead_failed(transaction, error)
                raise
            try:
                volumes.sweep(self.volumes, self.target, dead)
                with self._writer(transaction.directory, recycle=transaction.recycle) as writer:
                    writer.write(groups, observer)
                    part = writer.part(share.description)
                    writer.sync(transaction.directory)
                ref = PartRef(0, "", 0, "")  # its part is in the root: there is no file to refer to
                own = share.done(ref, writer.names, writer.stored_nbytes, tree=part.tree is not None)
                shares = self.round.collect(own)
                self.agreement(shares)
                root = self._root(flat, share, part, shares[1:])
                names = {MANIFEST, *(name for written in shares for name in written.files)}
                transaction.keep_only(names)
                transaction.seal(names, root, unneeded=[id + SAVE_MARK for id in marks])
                observer.committing()
            except BaseException as error:
                self._lead_failed(transaction, error)
                if not isinstance(error, RankFailed):
                    self.round.await_others()
                self._remove_from_volumes(last=True)
                raise
            try:
                # As long as the replaced one is there, a save that comes after a crash knows of it.
                transaction.publish(replaced=lambda: self._forget_replaced(replaced))
            except BaseException as error:
                self._lead_failed(transaction, error)
                raise
        observer.committed()
        if self.ledger is not None:
            self.ledger.write(self.ledger.read() - dead)
        end = Committed(
            sum(written.nbytes for written in shares),
            len(root) + sum(written.stored_nbytes for written in shares),
            share.leaves,
            replaced,
        )
        self.round.end(end)
        return self._info(end, writer, began)

    def _opened(self, transaction: Transaction, dead: frozenset[str]) -> Opened:
        """Where the other ranks write."""
        host, found = socket.gethostname(), fs.identity(transaction.directory)
        return Opened(os.fsencode(transaction.path), transaction.recycle, tuple(dead), host, found)

    def _lead_failed(self, transaction: Transaction, error: BaseException) -> None:
        self.round.failed(self._typed(error), maybe_committed=not transaction.names_certain)
        names_certain = transaction.names_certain
        if (
            self.ledger is not None
            and names_certain
            and _id_in(transaction.parent, self.target) != self.identity.id
        ):
            self.ledger.add([self.identity.id])

    def _dead(self, transaction: Transaction) -> frozenset[str]:
        """The checkpoints whose shards are removed before anything is written, to free space."""
        if self.ledger is None:
            return frozenset(volumes.left_behind(path_to_read(transaction.parent, transaction.entry.name)))
        return frozenset() if self.live is None else frozenset(self.ledger.read() - self.live)

    def _replaced(self, transaction: Transaction) -> tuple[str, ...]:
        """The checkpoint whose shards are removed after this commit."""
        there = self.overwrite and fs.exists(transaction.target_entry)
        found = _id_in(transaction.parent, self.target) if there else None
        return () if found is None else (found,)

    def _forget_replaced(self, replaced: tuple[str, ...]) -> None:
        """The old checkpoint is replaced for good: its shards on volumes are dead."""
        if self.ledger is not None:
            self.ledger.add(replaced)
        volumes.sweep(self.volumes, self.target, replaced)

    def _note(self, partial: OpenDirectory, dead: frozenset[str]) -> frozenset[str]:
        """Leaves marks for the next save, in case this one does not finish; returns them.

        The ledger learns of this save only if it fails, or by its mark. If it were noted now, a kill after
        the commit would leave a checkpoint that counts as dead once it is moved out of its run.
        """
        marks = dead | {self.identity.id}
        if self.ledger is not None:
            marks = frozenset([self.identity.id])
            kept = self.ledger.read() if self.live is None else ()
            self.ledger.write({*dead, *kept})
        if not self.marked:
            return frozenset()
        volumes.mark(partial, marks)
        return marks

    def _root(self, flat: Flat, share: WriteShare, part: Part, dones: Sequence[ShareWritten]) -> bytearray:
        return encode_root(
            root_of(
                self.identity,
                flat.tree,
                part,
                world=self.round.world,
                others=[done.ref for done in dones],
                trees=[done.ref.rank for done in dones if done.tree],
                layout=share.layout,
            )
        )

    # --- everybody else

    def _follow(
        self,
        flat: Flat,
        share: WriteShare,
        groups: Sequence[Sequence[LeafSource]],
        observer: SaveObserver,
        began: float,
    ) -> CheckpointInfo:
        opened = self.round.open(None)
        try:
            # Held, so that a rank that was given up never writes into what others put in its place.
            with open_partial(os.fsdecode(opened.directory)) as directory:
                self._require_same(opened, directory)
                volumes.sweep(self.volumes, self.target, opened.dead)
                with self._writer(directory, recycle=opened.recycle) as writer:
                    writer.write(groups, observer)
                    part = writer.part(share.description)
                    encoded = writer.sync(directory, part)
        except BaseException as error:
            self._remove_from_volumes(last=False)
            if isinstance(error, FileNotFoundError):
                self.round.check()  # a coordinator that gave up has removed what this rank writes to
                if opened.host != socket.gethostname() and not os.path.isdir(opened.directory):
                    raise self._not_shared(opened) from error
            raise
        try:
            files = (part_name(self.round.rank), *writer.names)
            stored_nbytes = writer.stored_nbytes + len(encoded)
            ref = part_ref(part, encoded)
            self.round.collect(share.done(ref, files, stored_nbytes, tree=part.tree is not None))
            end = self.round.end(None)
        except BaseException:
            # As long as nobody says that it has failed, it may have been committed.
            if self.round.rejected:
                self._remove_from_volumes(last=True)
            raise
        volumes.sweep(self.volumes, self.target, end.dead)
        return self._info(end, writer, began)

    def _require_same(self, opened: Opened, directory: OpenDirectory) -> None:
        """The coordinator may have died, and another world may write under the same name. Or a host that does
        not share the directory may have an old one of that name."""
        host = socket.gethostname()
        if opened.host != host:
            if not volumes.is_marked(directory, self.identity.id):
                raise self._not_shared(opened)
        elif fs.identity(directory) != opened.identity:
            raise RankFailed(
                f"the save of step {self.identity.step} was abandoned: another save now writes to "
                f"{os.fsdecode(opened.directory)}. Nothing of this save is committed",
                ranks=(0,),
            )

    def _not_shared(self, opened: Opened) -> StorageMissing:
        where, host = os.fsdecode(opened.directory), socket.gethostname()
        return StorageMissing(
            f"cannot save {self.target}: {where} on {host} is not the directory that rank 0 has on "
            f"{opened.host}. All ranks must share this directory (only volumes may be node-local). Or "
            "rank 0 has abandoned this save"
        )

    # --- both

    def _typed(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and not isinstance(error, EverystepError):
            return save_failed(error, self.target)
        return as_save_failure(error)

    def _writer(self, directory: OpenDirectory, *, recycle: bool) -> ShardWriter:
        locations = [ShardLocation(directory)]
        if self.volumes:
            locations = volumes.locations(self.volumes, self.target, self.identity.id)
        return ShardWriter(self.round.rank, locations, self.tuning, recycle=recycle)

    def _remove_from_volumes(self, *, last: bool) -> None:
        for volume in self.volumes:
            directory = os.path.join(volume, volumes.home(self.target), self.identity.id)
            volumes.remove_files_of(directory, self.round.rank, last=last)

    def _info(self, end: Committed, writer: ShardWriter, began: float) -> CheckpointInfo:
        seconds = time.perf_counter() - began
        commit = max(0.0, seconds - writer.write_seconds - writer.sync_seconds)
        return CheckpointInfo(
            path=self.target,
            step=self.identity.step,
            id=self.identity.id,
            created=self.identity.created,
            metrics=dict(self.identity.metrics),
            leaves=end.leaves,
            nbytes=end.nbytes,
            stored_nbytes=end.stored_nbytes,
            seconds=seconds,
            phases=Seconds(writer.write_seconds, writer.sync_seconds, commit),
        )


@contextmanager
def open_partial(path: str) -> Iterator[OpenDirectory]:
    """What is at the path that the coordinator has told of, be it what it has told of or not."""
    directory = fs.open_directory(path, False)
    try:
        yield directory
    finally:
        directory.release()


def _id_in(directory: OpenDirectory, target: str) -> str | None:
    return volumes.id_at(path_to_read(directory, os.path.basename(target)))
