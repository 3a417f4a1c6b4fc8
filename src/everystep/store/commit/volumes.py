"""Shards outside of the checkpoint's directory: on several devices of a node, or on node-local directories.

A volume is a directory on one device. The shards of one checkpoint are there in ``RUN-xxxxxxxx/ID/``: the
run's name with a digest of its path and directory, and the checkpoint's id. So no two saves ever write to the
same place. (A checkpoint outside of a run uses its own name and path instead.) The checkpoint's manifest says
where its shards are.

Only shards known to be dead are removed; unknown files stay. A checkpoint may be moved out of its run, or be
renamed, and keeps its shards. Shards are dead if their save was not committed, or their checkpoint was
retired or replaced. A save leaves its id in its ``D.partial``, and a run has a `Ledger` of all dead ids. When
the next save begins, all ranks get these ids, and each removes the dead shards from its own volumes.

A volume must exist: if its device is not mounted, no directory is made in its place on another device.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Sequence

from everystep.engine import Memory, WritePiece, fresh_bytes, fs
from everystep.engine.atomic_file import replace_file
from everystep.engine.fs import OpenDirectory
from everystep.errors import EverystepError, StorageMissing
from everystep.format.checksums import digest
from everystep.store.commit.transaction import Transaction
from everystep.store.locks import path_to_read
from everystep.store.names import (
    ANY_SHARD,
    CHECKPOINT_ID,
    LEDGER,
    MANIFEST,
    SAVE_MARK,
    UNFINISHED_FILES,
    is_step_name,
    sendable,
)
from everystep.store.read.checkpoint import open_checkpoint
from everystep.store.save_errors import saving

_PROBE_NBYTES = 16 << 20
_MAX_LEDGER_NBYTES = 64 << 20


def measure(volumes: Sequence[str]) -> list[float]:
    """How fast each can be written, in bytes per second; with one there is nothing to compare."""
    for volume in volumes:
        _require(volume)
    if len(volumes) < 2:
        return [1.0] * len(volumes)
    seconds = [math.inf] * len(volumes)
    # In turns: what disturbs the machine for a moment must not make one of them look slow. The first write
    # also pays for the memory it stages in.
    for _ in range(2):
        for number, volume in enumerate(volumes):
            with saving(volume):
                seconds[number] = min(seconds[number], _write_seconds(volume))
    return [_PROBE_NBYTES / max(each, 1e-6) for each in seconds]


def _write_seconds(volume: str) -> float:
    """Seconds until `_PROBE_NBYTES` in a file of their own are durable."""
    path = os.path.join(volume, f".everystep-probe-{secrets.token_hex(6)}")
    data = fresh_bytes(_PROBE_NBYTES)
    data[:] = 0x5A
    piece = WritePiece(0, Memory(data.ctypes.data, data.nbytes, data))
    began = time.perf_counter()
    try:
        fs.write_synced(path, data.nbytes, [piece])
        return time.perf_counter() - began
    finally:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)


def home(target: str) -> str:
    """The name under which the checkpoints of a run lie on its volumes; of one outside of a run, its own.

    A run is known by its directory, not only by its path: one that was moved away keeps its shards when
    another begins in its place.
    """
    parent, name = os.path.split(target)
    owner = os.path.realpath(parent)
    if not is_step_name(name):
        owner = os.path.join(owner, name)
        return _home(owner, os.fsencode(owner))
    try:
        inode = os.stat(owner).st_ino
    except OSError:  # it has gone, and nothing of it is on any volume yet
        inode = 0
    known = b"%s/%d" % (os.fsencode(owner), inode)
    return _home(owner, known)


def _home(owner: str, known: bytes) -> str:
    # Manifests are UTF-8; names of directories need not be.
    return f"{sendable(os.path.basename(owner))}-{digest(known)[:8]}"


def _require(volume: str) -> None:
    if not os.path.isdir(volume):
        raise StorageMissing(
            f"the volume {volume} does not exist on {socket.gethostname()}: create this directory, or check "
            "that its device is mounted"
        )


class Ledger:
    """The ids of a run's checkpoints whose shards are to go, until all ranks have removed theirs.

    Only the run's writer changes it, and writes it at most once per save: when a checkpoint is retired or
    replaced, or a save fails. It is not synced. A lost entry only costs space on the volumes; one that is
    there too long (all shards are gone, but the next write comes later, or never) is swept a second time,
    which finds nothing. It may be older than the run, so readers of it leave out live checkpoints.
    """

    def __init__(self, run: OpenDirectory) -> None:
        self._run = run
        self._swept: frozenset[str] = frozenset()
        """Entries whose shards are gone: the next write leaves them out."""

    def read(self) -> set[str]:
        try:
            with open(LEDGER, encoding="ascii", errors="replace", opener=self._open) as file:
                found = set(filter(CHECKPOINT_ID.fullmatch, file.read(_MAX_LEDGER_NBYTES).split()))
        except OSError:
            return set()
        return found - self._swept

    def _open(self, name: str, flags: int) -> int:
        return fs.open_regular(name, self._run.fileno(), flags)

    def write(self, ids: Iterable[str]) -> None:
        """Makes these the entries. Nothing is written if they are already, in a file that exists."""
        ids = set(ids)
        if ids == self.read() and fs.exists(self._run.at(LEDGER)):
            return
        data = "".join(f"{id}\n" for id in sorted(ids)).encode("ascii")
        try:
            replace_file(LEDGER, data, within=self._run, synced=False)
        except OSError:
            # An old one may name what has been committed since.
            with contextlib.suppress(OSError):
                fs.unlink(self._run.at(LEDGER))
        self._swept = frozenset()

    def forget(self, ids: Iterable[str]) -> None:
        """All ranks have removed the shards of these."""
        self._swept |= frozenset(ids)

    def sweep(self) -> None:
        """Removes what a writer of the run has left if it was killed while it replaced a file."""
        for name in UNFINISHED_FILES:
            with contextlib.suppress(OSError):
                fs.unlink(self._run.at(name))

    def add(self, ids: Iterable[str]) -> None:
        known = self.read()
        more = known.union(ids)
        if more != known:
            self.write(more)

    def add_leftovers(self, names: Iterable[str]) -> None:
        """Adds what a crashed writer has left, before it is removed. A run without volumes has no ledger."""
        if fs.exists(self._run.at(LEDGER)):
            self.add(id for name in names for id in left_behind(path_to_read(self._run, name)))


class OutsideShards:
    """What one save does about shards on volumes: its own, and those of checkpoints that are gone.

    The coordinator's order: `find_dead`, `mark`, `sweep`, then `forget_replaced`, `committed`; or `failed`.
    The other ranks only `sweep`, and `remove_own` if the save fails.
    """

    def __init__(
        self,
        volumes: Sequence[str],
        rank: int,
        target: str,
        id: str,
        *,
        ledger: Ledger | None = None,
        live: Collection[str] | None = None,
    ) -> None:
        """`volumes`: this rank's. `id`: of the checkpoint that is to appear at `target`.

        `ledger`: of a run whose shards go to volumes, on the coordinator. `live`: the ids of such a run's
        checkpoints, whose shards stay. None: one of them cannot be read, so all shards stay.
        """
        self._volumes = volumes
        self._homes = [os.path.join(volume, home(target)) for volume in volumes]
        self._rank = rank
        self._id = id
        self._ledger = ledger
        self._live = live
        self.dead: frozenset[str] = frozenset()
        """The checkpoints whose shards are removed before anything is written, to free space."""
        self.replaced: tuple[str, ...] = ()
        """The checkpoint whose shards are removed after this commit."""
        self.marks: list[str] = []
        """Files that are removed from ``D.partial`` before it becomes a checkpoint."""

    def directories(self) -> list[str]:
        """Where the shards of the checkpoint go. Nothing is made yet: a volume may get none."""
        for volume in self._volumes:
            _require(volume)
        return [os.path.join(home, self._id) for home in self._homes]

    def find_dead(self, transaction: Transaction) -> None:
        """Before the partial directory is made, which removes what an earlier save has left there."""
        parent, ledger = transaction.parent, self._ledger
        if ledger is None:
            self.dead = frozenset(left_behind(path_to_read(parent, transaction.entry.name)))
        elif self._live is not None:
            self.dead = frozenset(ledger.read().difference(self._live))
        if transaction.overwrite and fs.exists(transaction.target_entry):
            found = id_at(path_to_read(parent, transaction.target_entry.name))
            self.replaced = () if found is None else (found,)

    def mark(self, partial: OpenDirectory) -> None:
        """Names in ``D.partial`` this save, and those whose shards are to go: for ranks on other hosts, which
        look for it, and for the next save, in case this one does not finish.

        The ledger learns of this save only if it fails, or by its mark. If it were noted now, a kill after
        the commit would leave a checkpoint that counts as dead once it is moved out of its run. For the same
        reason live checkpoints are taken out of the ledger here. It must exist: `Ledger.add_leftovers`.
        """
        marks = {*self.dead, self._id}
        if self._ledger is not None:
            marks = {self._id}
            self._ledger.write(self._ledger.read() if self._live is None else self.dead)
        self.marks = [name + SAVE_MARK for name in marks]
        for name in self.marks:
            os.close(fs.open_regular(name, partial.fileno(), os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def sweep(self, dead: Iterable[str]) -> None:
        """Removes this rank's shards of dead checkpoints. Files that cannot be removed stay."""
        for id in dead:
            for home in self._homes:
                remove(os.path.join(home, id))

    def forget_replaced(self) -> None:
        """The old checkpoint is replaced for good: its shards are dead."""
        if self._ledger is not None:
            self._ledger.add(self.replaced)
        self.sweep(self.replaced)

    def committed(self) -> None:
        if self._ledger is not None:
            self._ledger.forget(self.dead)

    def failed(self, transaction: Transaction) -> None:
        """On the coordinator: removes what it has written, and notes what others may still be writing."""
        if id_at(path_to_read(transaction.parent, transaction.target_entry.name)) == self._id:
            return
        if self._ledger is not None:
            self._ledger.add([self._id])
        self.remove_own(last=True)

    def remove_own(self, *, last: bool) -> None:
        """Removes what this rank has written, after a failure. `last`: no other rank writes there any more;
        otherwise the directory is left to a later save."""
        for home in self._homes:
            remove(os.path.join(home, self._id), self._rank, last=last)


def id_at(path: str) -> str | None:
    """The id of the checkpoint at a path; None if there is none, or it cannot be read."""
    try:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.id if CHECKPOINT_ID.fullmatch(checkpoint.id) else None
    except EverystepError:
        return None


def is_marked(partial: OpenDirectory, id: str) -> bool:
    """Whether this is the directory of that save."""
    return fs.exists(partial.at(id + SAVE_MARK))


def left_behind(partial: str) -> set[str]:
    """The ids in a leftover: of saves that were not committed, and of a checkpoint replaced or retired."""
    try:
        names = os.listdir(partial)
    except OSError:
        return set()
    found = {name.removesuffix(SAVE_MARK) for name in names if name.endswith(SAVE_MARK)}
    replaced = id_at(partial) if MANIFEST in names else None
    return set(filter(CHECKPOINT_ID.fullmatch, found if replaced is None else {*found, replaced}))


def homes_of(path: str) -> tuple[str | None, set[str]]:
    """The id of a checkpoint that has shards on volumes, and the directories of this host that hold them.

    Only those that were made for a checkpoint of this very run: a copy of the run has the same manifests, and
    a manifest may say anything.
    """
    host = socket.gethostname()
    with open_checkpoint(path) as checkpoint:
        files = [file for part in checkpoint._parts for file in part.files if file.volume is not None]
        own = os.path.join(os.sep, home(path), checkpoint.id)
        here = {file.volume for file in files if file.volume is not None and file.host == host}
        found = {volume for volume in here if CHECKPOINT_ID.fullmatch(checkpoint.id) and volume.endswith(own)}
        return checkpoint.id if files else None, found


def remove(directory: str, rank: int | None = None, *, last: bool = True) -> None:
    """Removes the shards of one checkpoint, or of one rank of it, from a volume; others may do so, too.

    `last`: and the directory, if nothing else is in it. Of a link, only the link is removed.
    """
    with contextlib.suppress(OSError):
        if os.path.islink(directory):
            fs.unlink(directory)
            return
        held = fs.open_directory(directory, False)
        try:
            for name in filter(ANY_SHARD.fullmatch, os.listdir(held.fileno())):
                if rank is None or name.startswith(f"r{rank:05d}."):
                    with contextlib.suppress(FileNotFoundError):
                        fs.unlink(held.at(name))
        finally:
            held.release()
        if last:
            fs.rmdir(directory)
