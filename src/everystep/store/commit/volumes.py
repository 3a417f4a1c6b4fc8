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
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from everystep.engine import SAVING, Memory, WritePiece, choose_backend, fresh_bytes, fs, write
from everystep.engine.atomic_file import replace_file
from everystep.engine.fs import OpenDirectory
from everystep.errors import EverystepError, StorageMissing
from everystep.format.checksums import digest
from everystep.store.commit.shard_writer import ShardLocation
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
    speeds: list[float] = []
    for volume in volumes:
        with saving(volume):
            # The first write also pays for the memory it stages in.
            speeds.append(_PROBE_NBYTES / max(min(_write_seconds(volume), _write_seconds(volume)), 1e-6))
    return speeds


def _write_seconds(volume: str) -> float:
    """Seconds until `_PROBE_NBYTES` in a file of their own are durable."""
    path = os.path.join(volume, f".everystep-probe-{secrets.token_hex(6)}")
    data = fresh_bytes(_PROBE_NBYTES)
    data[:] = 0x5A
    piece = WritePiece(0, Memory(data.ctypes.data, data.nbytes, data))
    tuning = replace(SAVING, backend=choose_backend(volume))
    began = time.perf_counter()
    try:
        with write(path, data.nbytes, [piece], tuning=tuning) as job:
            job.wait()
            fs.sync([job])
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
    # Manifests are UTF-8; what a directory is named need not be.
    return f"{sendable(os.path.basename(owner))}-{digest(known)[:8]}"


def locations(volumes: Sequence[str], target: str, id: str) -> list[ShardLocation]:
    """Where the shards of a checkpoint go. Nothing is made yet: a volume may get none."""
    host = socket.gethostname()
    found: list[ShardLocation] = []
    for volume in volumes:
        _require(volume)
        directory = os.path.join(volume, home(target), id)
        found.append(ShardLocation(None, directory, host))
    return found


def _require(volume: str) -> None:
    if not os.path.isdir(volume):
        raise StorageMissing(
            f"the volume {volume} does not exist on {socket.gethostname()}: create this directory, or check "
            "that its device is mounted"
        )


class Ledger:
    """The ids of a run's checkpoints whose shards are to go, until all ranks have been told.

    Only the run's writer changes it. It is not synced: a lost entry only costs space on the volumes. It may
    be older than the run, so readers of it leave out live checkpoints.
    """

    def __init__(self, run: OpenDirectory) -> None:
        self._run = run

    def read(self) -> set[str]:
        try:
            with open(LEDGER, encoding="ascii", errors="replace", opener=self._open) as file:
                return set(filter(CHECKPOINT_ID.fullmatch, file.read(_MAX_LEDGER_NBYTES).split()))
        except OSError:
            return set()

    def _open(self, name: str, flags: int) -> int:
        return fs.open_regular(name, self._run.fileno(), flags)

    def write(self, ids: Iterable[str]) -> None:
        data = "".join(f"{id}\n" for id in sorted(ids)).encode("ascii")
        try:
            replace_file(LEDGER, data, within=self._run, synced=False)
        except OSError:
            # An old one may speak of what has been committed since.
            with contextlib.suppress(OSError):
                fs.unlink(self._run.at(LEDGER))

    def sweep(self) -> None:
        """Removes what a writer of the run has left that was killed while it replaced a file."""
        for name in UNFINISHED_FILES:
            with contextlib.suppress(OSError):
                fs.unlink(self._run.at(name))

    def add(self, ids: Iterable[str]) -> None:
        known = self.read()
        more = known.union(ids)
        if more != known:
            self.write(more)

    def add_leftovers(self, names: Iterable[str]) -> None:
        """What a crashed writer has left, before it is removed. A run without volumes has no ledger."""
        if fs.exists(self._run.at(LEDGER)):
            self.add(id for name in names for id in left_behind(path_to_read(self._run, name)))


def id_at(path: str) -> str | None:
    """The id of the checkpoint at a path; None when there is none, or it cannot be told."""
    try:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.id if CHECKPOINT_ID.fullmatch(checkpoint.id) else None
    except EverystepError:
        return None


def mark(partial: OpenDirectory, ids: Iterable[str]) -> None:
    """Names saves in a ``D.partial``: the one that is under way there, and those whose shards are to go."""
    for id in ids:
        os.close(fs.open_regular(id + SAVE_MARK, partial.fileno(), os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def is_marked(partial: OpenDirectory, id: str) -> bool:
    """Whether this is the directory of that save."""
    return fs.exists(partial.at(id + SAVE_MARK))


def remove_marks(partial: OpenDirectory, ids: Iterable[str]) -> None:
    """Before it becomes a checkpoint."""
    for id in ids:
        fs.unlink(partial.at(id + SAVE_MARK))


def left_behind(partial: str) -> set[str]:
    """The ids of what a leftover is of: saves that were not committed, or what was replaced or retired."""
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


def sweep(volumes: Sequence[str], target: str, dead: Iterable[str]) -> None:
    """Removes the shards of dead checkpoints. Files that cannot be removed stay."""
    for id in dead:
        for volume in volumes:
            remove(os.path.join(volume, home(target), id))


def remove_files_of(directory: str, rank: int, *, last: bool) -> None:
    """Removes the files of one rank after a failure. `last`: also the directory, if it is empty. While other
    ranks may still write to it, it is left to a later save."""
    with contextlib.suppress(OSError):
        held = fs.open_directory(directory, False)
        try:
            for name in os.listdir(held.fileno()):
                if name.startswith(f"r{rank:05d}."):
                    fs.unlink(held.at(name))
        finally:
            held.release()
        if last:
            fs.rmdir(directory)


def remove(directory: str) -> None:
    """Removes one checkpoint's shards from a volume, and nothing else; others may be doing so, too."""
    with contextlib.suppress(OSError):
        if os.path.islink(directory):
            fs.unlink(directory)  # the link only, wherever it leads
            return
        held = fs.open_directory(directory, False)
        try:
            for name in filter(ANY_SHARD.fullmatch, os.listdir(held.fileno())):
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(held.at(name))
        finally:
            held.release()
        fs.rmdir(directory)
