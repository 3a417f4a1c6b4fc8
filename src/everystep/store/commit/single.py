"""The driver of the commit protocol for one process that writes one shard (`transaction` is the protocol)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from everystep import engine
from everystep.engine import Tuning, fs
from everystep.errors import UnsupportedState
from everystep.format.checksums import digest
from everystep.format.manifest import encode_root
from everystep.format.records import ShardFile
from everystep.plan import ShardPlan, arrange
from everystep.state import Flat, LeafSource
from everystep.store.commit.info import CheckpointInfo, Seconds, check_step
from everystep.store.commit.manifest import (
    Identity,
    OneFile,
    leaf_records,
    one_file,
    require_complete,
    root_of_one,
)
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.transaction import Target, Transaction
from everystep.store.names import MANIFEST, SHARD


class SingleCommit(Struct, frozen=True):
    """One checkpoint to be committed."""

    to: Target
    step: int
    metrics: Mapping[str, float]
    tuning: Tuning
    overwrite: bool = False

    def run(
        self,
        flat: Flat,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        observer: SaveObserver | None = None,
    ) -> CheckpointInfo:
        """Saves a flattened state; returns when it is durable. If it fails, it cleans up and raises.

        `groups`: the same leaves in the order in which they are to leave memory.
        """
        began = time.perf_counter()
        identity = Identity(os.urandom(16).hex(), check_step(self.step), time.time(), dict(self.metrics))
        with Transaction.begin(self.to, overwrite=self.overwrite) as transaction:
            return self._save(transaction, identity, flat, groups, observer or SaveObserver(), began)

    def _save(
        self,
        transaction: Transaction,
        identity: Identity,
        flat: Flat,
        groups: Sequence[Sequence[LeafSource]] | None,
        observer: SaveObserver,
        began: float,
    ) -> CheckpointInfo:
        leaves = flat.leaves + flat.local_leaves
        names = {leaf.name for leaf in leaves}
        _refuse_parts(leaves)
        layout = arrange([leaves] if groups is None else groups)
        limit = self.tuning.small_nbytes
        single = one_file(identity, flat, layout, limit) if layout.nbytes < limit else None
        plan = layout.plan() if single is None else single.plan
        del layout  # with all that its header says: of many leaves, that is a lot
        if single is None:
            transaction.refuse_existing()
        else:
            _require_complete(flat, names)
            # All has been copied: the sources are free before the file system is even asked.
            observer.writing([(plan, single.packed)])
            observer.written()
        # Choosing may write a trial file, so it comes before there is anything to clean up.
        tuning = self.tuning
        if plan.nbytes > limit or tuning.backend is not None:
            tuning = replace(tuning, backend=engine.choose_backend(transaction.parent, tuning.backend))
        transaction.make()
        writing = time.perf_counter()
        if single is None:
            manifest_nbytes, synced = self._write(identity, flat, names, plan, tuning, observer, transaction)
        else:
            manifest_nbytes, synced = 0, self._write_one_file(single, transaction)
        syncing = time.perf_counter()
        observer.committing()
        transaction.publish()
        observer.committed()
        ended = time.perf_counter()
        return CheckpointInfo(
            path=self.to.path,
            step=identity.step,
            id=identity.id,
            created=identity.created,
            metrics=identity.metrics,
            leaves=len(names),
            nbytes=sum([leaf.source.nbytes for leaf in leaves]),
            stored_nbytes=plan.nbytes + manifest_nbytes,
            seconds=ended - began,
            phases=Seconds(syncing - writing - synced, synced, ended - began - (syncing - writing)),
        )

    def _write(
        self,
        identity: Identity,
        flat: Flat,
        leaf_names: set[str],
        plan: ShardPlan,
        tuning: Tuning,
        observer: SaveObserver,
        transaction: Transaction,
    ) -> tuple[int, float]:
        """Steps 2 to 4. Returns the size of the manifest, and the seconds that sealing took."""
        names = {SHARD, MANIFEST}
        transaction.keep_only(names)
        # Left by an error, it ends the job: the engine must not go on reading memory that the caller changes.
        with engine.write(
            transaction.directory.at(SHARD),
            plan.nbytes,
            plan.pieces(),
            tuning=tuning,
            header=plan.header,
            recycle=transaction.recycle,
            background=plan.nbytes > tuning.small_nbytes,
        ) as job:
            _require_complete(flat, leaf_names)  # while the engine writes
            observer.writing([(plan, job)])
            job.wait(progress=observer.advanced)
            observer.written()
            shard = ShardFile(SHARD, plan.nbytes, len(plan.header), digest(plan.header))
            leaves = leaf_records(plan.leaves, plan.offsets, job.checksums())
            manifest = encode_root(root_of_one(identity, flat, shard), leaves)
            began = time.perf_counter()
            transaction.seal(names, manifest, [job])
        return len(manifest), time.perf_counter() - began

    def _write_one_file(self, single: OneFile, transaction: Transaction) -> float:
        """Steps 2 to 4 of a small state. Returns the seconds that sealing took."""
        transaction.keep_only({SHARD})
        with fs.write_file(
            transaction.directory.at(SHARD),
            single.plan.header,
            single.packed.data,
            recycle=transaction.recycle,
        ) as file:
            began = time.perf_counter()
            transaction.seal({SHARD}, None, [file])
        return time.perf_counter() - began


def _require_complete(flat: Flat, leaf_names: set[str]) -> None:
    names = leaf_names
    if flat.aliases or flat.local_aliases:
        names = names | {name for name, _ in (*flat.aliases, *flat.local_aliases)}
    require_complete((flat.tree, *flat.local.values()), names)


def _refuse_parts(leaves: Sequence[LeafSource]) -> None:
    """A single process can store only arrays that it holds completely, in one array or in several boxes."""
    boxes: dict[str, list[LeafSource]] = {}
    for leaf in leaves:
        if leaf.fragment is not None:
            boxes.setdefault(leaf.name, []).append(leaf)
        elif leaf.sharding is not None and leaf.sharding.shape != leaf.shape:
            raise _part(leaf, list(leaf.shape))
    for parts in boxes.values():
        held = sum(math.prod(leaf.shape) for leaf in parts)
        if held != math.prod(parts[0].whole_shape):
            raise _part(parts[0], f"{held} elements")


def _part(leaf: LeafSource, held: object) -> UnsupportedState:
    return UnsupportedState(
        f"{leaf.name}: this process holds only {held} of an array of shape {list(leaf.whole_shape)}; other "
        'ranks hold the rest. Save it on all of them together, without process_group="none"'
    )
