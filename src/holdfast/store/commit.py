"""The commit protocol: how a checkpoint becomes durable, all or nothing.

For a checkpoint that shall appear at ``D`` in directory ``P`` (held open, and reached by its descriptor), one
process:

1. Make ``D.partial`` in ``P``, or rename a retired checkpoint to it to write over its files. Nobody reads a
   name that ends in ``.partial``, so nothing before step 5 can be taken for a checkpoint.
2. Write the shard. Its bytes come from the caller's memory; checksums are computed on the way.
3. Write the manifest, which holds the checksums. (A small state is copied first, so that its checksums are
   known; then its manifest is in the shard's header, and this step is part of the one before.)
4. Sync the shard, the manifest, and the directory ``D.partial``: all there is to the checkpoint is durable.
   (The directory's entries may be durable already: those of a checkpoint that this process committed and
   retired, and in which nothing was made or removed since.)
5. Rename ``D.partial`` to ``D``. **This is the commit.** It fails if anything has that name by now. And it
   fails if the path of ``P`` leads elsewhere by now: readers would not find the checkpoint.
   (Replacing an old one: exchange the two names. It is held against other writers until it is removed. For
   directories that are there already, and files of others, see `holdfast.store.beside`.)
6. Sync ``P``. Now, and only now, the save is reported durable.

A crash before the rename reached the disk leaves ``D.partial``, which the next writer sweeps away; after it,
a whole checkpoint. The rename cannot reach the disk before what step 4 synced. ``D.partial`` itself needs no
sync of ``P``: nobody relies on it until step 6 syncs the same directory.

A sync that fails is final: the kernel may have dropped the dirty pages, and a second sync would lie. The save
fails, what it left is removed, and what was there before has not been touched.
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import SupportsIndex

from msgspec import Struct

from holdfast import engine
from holdfast.engine import Tuning, fs
from holdfast.engine.fs import Entry
from holdfast.errors import CheckpointExists, HoldfastError, RunLocked, UnsupportedState
from holdfast.format.checksums import digest
from holdfast.format.embedded import EMBEDDING_SHARD
from holdfast.format.manifest import MANIFEST_NAME, encode_root
from holdfast.format.records import ShardFile
from holdfast.plan import ShardPlan, arrange
from holdfast.state import Flat, LeafSource
from holdfast.store.beside import carry_over, found_at, is_ours, settle_in
from holdfast.store.describe import Identity, OneFile, describe, leaf_records, one_file
from holdfast.store.directories import (
    LOCK_SECONDS,
    require_current,
    share_directory,
    try_lock_directory,
)
from holdfast.store.failures import save_failed
from holdfast.store.partial import PARTIAL, Partial, Target
from holdfast.store.watch import Watch

MANIFEST = MANIFEST_NAME
SHARD = EMBEDDING_SHARD


class Seconds(Struct, frozen=True):
    """Where the time of a commit went: bytes to the device, syncs of the files, and all the rest."""

    write: float
    sync: float
    commit: float


class CheckpointInfo(Struct, frozen=True):
    """What a save did. `nbytes` counts the leaves, `stored_nbytes` the files."""

    path: str
    step: int
    id: str
    created: float
    metrics: Mapping[str, float]
    leaves: int
    nbytes: int
    stored_nbytes: int
    seconds: float
    phases: Seconds


class Commit(Struct, frozen=True):
    """One checkpoint to be committed."""

    to: Target
    step: int
    metrics: Mapping[str, float]
    tuning: Tuning
    overwrite: bool = False

    @property
    def target(self) -> str:
        return self.to.path

    def run(
        self,
        flat: Flat,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        watch: Watch | None = None,
    ) -> CheckpointInfo:
        """Save a state taken apart; returns when it is durable. Else raises and leaves nothing behind.

        `groups`: the same leaves in the order in which they shall leave memory.
        """
        began = time.perf_counter()
        identity = Identity(os.urandom(16).hex(), check_step(self.step), time.time(), dict(self.metrics))
        try:
            with self.to.opened() as parent:
                partial = Partial(parent, self.target, self.to.spare)
                try:
                    try:
                        fs.anchor(parent.path, once=True)
                        return self._save(partial, identity, flat, groups, watch or Watch(), began)
                    except BaseException:
                        partial.remove()
                        raise
                    finally:
                        partial.release()
                except BaseException:
                    partial.release()  # an interrupt may have struck before the other call had done anything
                    raise
        except OSError as error:
            if isinstance(error, HoldfastError):
                raise
            raise save_failed(error, self.target) from error

    def _save(
        self,
        partial: Partial,
        identity: Identity,
        flat: Flat,
        groups: Sequence[Sequence[LeafSource]] | None,
        watch: Watch,
        began: float,
    ) -> CheckpointInfo:
        leaves = flat.leaves + flat.local_leaves
        _refuse_parts(leaves)
        layout = arrange([leaves] if groups is None else groups)
        limit = self.tuning.small_nbytes
        single = one_file(identity, flat, layout, limit) if layout.nbytes < limit else None
        plan = layout.plan() if single is None else single.plan
        del layout  # with all that its header says: of many leaves, that is a lot
        if single is None:
            refuse_existing(self.target, overwrite=self.overwrite)  # before anything large is written
        else:
            # All has been copied: the sources are free before the file system is even asked.
            watch.writing([(plan, single.packed)])
            watch.written()
        # Choosing may write a trial file, so it comes before there is anything to clean up.
        tuning = self.tuning
        if plan.nbytes > limit or tuning.backend is not None:
            tuning = replace(tuning, backend=engine.choose_backend(partial.parent, tuning.backend))
        partial.make()
        writing = time.perf_counter()
        if single is None:
            manifest_nbytes, synced = self._write(identity, flat, plan, tuning, watch, partial)
        else:
            manifest_nbytes, synced = 0, self._write_one_file(single, partial)
        syncing = time.perf_counter()
        watch.committing()
        publish(partial, overwrite=self.overwrite)
        watch.committed()
        ended = time.perf_counter()
        return CheckpointInfo(
            path=self.target,
            step=identity.step,
            id=identity.id,
            created=identity.created,
            metrics=identity.metrics,
            leaves=len(leaves),
            nbytes=sum([leaf.source.nbytes for leaf in leaves]),
            stored_nbytes=plan.nbytes + manifest_nbytes,
            seconds=ended - began,
            phases=Seconds(syncing - writing - synced, synced, ended - began - (syncing - writing)),
        )

    def _write(
        self,
        identity: Identity,
        flat: Flat,
        plan: ShardPlan,
        tuning: Tuning,
        watch: Watch,
        partial: Partial,
    ) -> tuple[int, float]:
        """Steps 2 to 4. Returns the size of the manifest, and the seconds that the syncs took."""
        ours = {SHARD, MANIFEST}
        partial.clear(ours)
        # Left by an error, it ends the job: the engine must not go on reading memory that the caller changes.
        with engine.write(
            partial.directory.at(SHARD),
            plan.nbytes,
            plan.pieces(),
            tuning=tuning,
            header=plan.header,
            recycle=partial.recycle,
            background=plan.nbytes > tuning.small_nbytes,
        ) as job:
            watch.writing([(plan, job)])
            job.wait()
            watch.written()
            shard = ShardFile(SHARD, plan.nbytes, len(plan.header), digest(plan.header))
            leaves = leaf_records(plan.leaves, plan.offsets, job.checksums())
            encoded = encode_root(describe(identity, flat, shard), leaves)
            with fs.write_file(partial.directory.at(MANIFEST), encoded, recycle=partial.recycle) as manifest:
                began = time.perf_counter()
                fs.sync([job, manifest], partial.directory_to_sync(ours, [job, manifest]))
        return len(encoded), time.perf_counter() - began

    def _write_one_file(self, single: OneFile, partial: Partial) -> float:
        """Steps 2 to 4 of a small state. Returns the seconds that the syncs took."""
        partial.clear({SHARD})
        with fs.write_file(
            partial.directory.at(SHARD), single.plan.header, single.packed.data, recycle=partial.recycle
        ) as file:
            began = time.perf_counter()
            fs.sync([file], partial.directory_to_sync({SHARD}, [file]))
        return time.perf_counter() - began


def _refuse_parts(leaves: Sequence[LeafSource]) -> None:
    """One process can store whole arrays only: of others it does not have all."""
    for leaf in leaves:
        if leaf.sharding is not None and leaf.sharding.shape != leaf.shape:
            raise UnsupportedState(
                f"{leaf.name}: this process has {list(leaf.shape)} of an array of shape "
                f"{list(leaf.sharding.shape)} that is spread over ranks. Save it on all of them together "
                "(not with together=False)"
            )


def refuse_existing(target: str, *, overwrite: bool) -> None:
    """Raises what `publish` would, in time."""
    if not overwrite and fs.exists(target) and found_at(target, target + PARTIAL) in _IN_THE_WAY:
        raise _existing(target)


_IN_THE_WAY = ("checkpoint", "something else")


def _existing(target: str) -> CheckpointExists:
    return CheckpointExists(
        f"Checkpoint already exists: {target}, and checkpoints are immutable. "
        "Choose another path, or pass overwrite=True to replace it atomically"
    )


def publish(
    partial: Partial,
    *,
    overwrite: bool,
    beside: bool = False,
    replaced: Callable[[], None] | None = None,
) -> None:
    """Steps 5 and 6. A failed sync takes the name back: what has failed must not be found.

    `beside`: a directory with files of others will do, not only an empty one (`holdfast.store.beside`).
    `replaced` is called when that is durable and an old checkpoint is about to be removed.
    """
    require_current(partial.parent)
    if not (overwrite and fs.exists(partial.target_entry)):
        with contextlib.suppress(FileExistsError):
            _change_names(partial, fs.rename_new)
            return
    found = found_at(partial.target, partial.path)
    if found == "empty" or (found == "others" and beside):
        _settle_in(partial)
        return
    if found != "checkpoint" or not overwrite:
        raise _existing(partial.target)
    # Shared with its readers, but not with the next writer: to that one, what is replaced would look like the
    # leftover of a crash, to be swept away. Then this one would remove what the next one makes there.
    old = share_directory(partial.target_entry, LOCK_SECONDS)
    if old is None:
        raise RunLocked(f"another process is saving to {partial.target}; one writer per checkpoint")
    try:
        carry_over(old, partial.directory)
        _change_names(partial, fs.exchange)
        if replaced is not None:
            replaced()
        with contextlib.suppress(OSError):  # durable already; the next save to this path sweeps it
            carry_over(old, partial.directory)
            fs.remove_tree(partial.entry)
    finally:
        old.release()


def _settle_in(partial: Partial) -> None:
    """Steps 5 and 6 where a directory without a checkpoint is. That it is held keeps readers waiting."""
    into = try_lock_directory(partial.target_entry)
    if into is None:
        raise RunLocked(f"another process is saving to {partial.target}; one writer per checkpoint")
    partial.settled = False  # the next writer needs it to take back what could not be
    try:
        settle_in(partial.directory, into, partial.parent)
        partial.settled = True
    except FileExistsError:
        partial.settled = True
        raise _existing(partial.target) from None
    except OSError:
        partial.settled = not any(map(is_ours, os.listdir(into.fileno())))
        raise
    finally:
        into.release()
    partial.remove()


def _change_names(partial: Partial, move: Callable[[Entry, Entry], None]) -> None:
    parent, ours, target = partial.parent, partial.entry, partial.target_entry
    partial.settled = False
    try:
        move(ours, target)
    except OSError:
        partial.settled = True
        raise
    try:
        fs.sync_dir(parent)
    except OSError:
        move(target, ours)
        fs.sync_dir(parent)  # no second try of the first: the names have changed again
        partial.settled = True
        raise
    partial.published = True
    partial.settled = True


def check_step(step: SupportsIndex) -> int:
    """The step as an int, whatever library counted it. Steps are what directory names can hold, 12 digits."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**12 or isinstance(step, bool):
        raise ValueError(f"step must be an int from 0 to 10**12 - 1, not {step!r}")
    return number
