"""Shards outside of the checkpoint's directory: on several devices of a node, or on directories of its own.

A volume is a directory on one device. The shards of one checkpoint lie there in ``RUN-xxxxxxxx/ID/``: the
run's name with a digest of its path and directory, and the checkpoint's id, so that no two saves ever write
to the same place. (One that is not in a run has its own name and path for those of the run.) A checkpoint's
manifest says where its shards are; what no manifest of the run speaks of is removed by a later save.

A volume must be there: one that is not mounted is not made in its place on another device.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Sequence

from holdfast.engine import fs, raw_write
from holdfast.errors import StorageMissing
from holdfast.format.checksums import digest
from holdfast.store.checkpoint import Checkpoint
from holdfast.store.run import is_step_name
from holdfast.store.writing import Place

_PROBE_NBYTES = 32 << 20


def measure(volumes: Sequence[str]) -> list[float]:
    """How fast each can be written, in bytes per second; with one there is nothing to compare."""
    for volume in volumes:
        _require(volume)
    if len(volumes) < 2:
        return [1.0] * len(volumes)
    speeds: list[float] = []
    for volume in volumes:
        path = os.path.join(volume, f".holdfast-probe-{os.getpid()}")
        try:
            speeds.append(_PROBE_NBYTES / max(raw_write(path, _PROBE_NBYTES), 1e-6))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return speeds


def home(target: str) -> str:
    """The name under which the checkpoints of a run lie on its volumes; of one outside of a run, its own.

    A run is known by its directory, not only by its path: one that was moved away keeps its shards when
    another begins in its place.
    """
    parent, name = os.path.split(target)
    owner = os.path.realpath(parent)
    if not is_step_name(name):
        owner = os.path.join(owner, name)
        return f"{os.path.basename(owner)}-{digest(os.fsencode(owner))[:8]}"
    try:
        inode = os.stat(owner).st_ino
    except OSError:  # it has gone, and nothing of it is on any volume yet
        inode = 0
    known = b"%s/%d" % (os.fsencode(owner), inode)
    return f"{os.path.basename(owner)}-{digest(known)[:8]}"


def places(volumes: Sequence[str], target: str, id: str) -> list[Place]:
    """Where the shards of a checkpoint go. Nothing is made yet: a volume may get none."""
    host = socket.gethostname()
    found: list[Place] = []
    for volume in volumes:
        _require(volume)
        directory = os.path.join(volume, home(target), id)
        found.append(Place(directory, directory, host))
    return found


def _require(volume: str) -> None:
    if not os.path.isdir(volume):
        raise StorageMissing(
            f"there is no volume {volume} on {socket.gethostname()}: create this directory, or check that "
            "its device is mounted"
        )


def homes_of(path: str) -> set[str]:
    """The directories on volumes of this host that hold shards of a checkpoint."""
    host = socket.gethostname()
    found: set[str] = set()
    with Checkpoint(path) as checkpoint:
        for part in checkpoint.parts:
            found.update(file.volume for file in part.files if file.volume is not None and file.host == host)
    return found


def sweep(volumes: Sequence[str], target: str, live: Collection[str]) -> None:
    """Removes the shards of checkpoints that are no more. What resists is left for the next time."""
    for volume in volumes:
        base = os.path.join(volume, home(target))
        with contextlib.suppress(OSError):
            for name in os.listdir(base):
                if name not in live:
                    remove(os.path.join(base, name))


def remove_files_of(directory: str, rank: int, *, last: bool) -> None:
    """Removes what one rank wrote, after a failure. `last`: and the directory, if nothing else is there; as
    long as others may be about to write to it, it is left to a later save."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.startswith(f"r{rank:05d}."):
                fs.unlink(os.path.join(directory, name))
        if last:
            fs.rmdir(directory)


def remove(directory: str) -> None:
    """Removes one checkpoint's shards from a volume."""
    with contextlib.suppress(OSError):
        fs.remove_tree(directory)
