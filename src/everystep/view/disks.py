"""The file systems that hold a run's checkpoints, their free space, and warnings about them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from everystep.inspect.machine import Device, find_device, find_mount, mount_advice
from everystep.view.words import shown_path


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system below a directory: that of a run, or a volume.

    `fits`: how many checkpoints like the newest fit there. It counts everything that such a checkpoint
    puts on this file system, also into other directories. `missing`: why nothing is known about it, for
    example because the volume is on another host.
    """

    path: str
    kind: str = ""
    point: str = ""
    source: str = ""
    device: Device | None = None
    free_nbytes: int = 0
    all_nbytes: int = 0
    free_inodes: int | None = None
    fits: int | None = None
    warnings: tuple[str, ...] = ()
    missing: str | None = None


def disks(run: str, own_nbytes: int = 0, volumes: Mapping[str, int] | None = None) -> tuple[Disk, ...]:
    """The file systems of a run and its volumes, as far as they can be reached from here.

    `own_nbytes` and `volumes`: what the newest checkpoint has in the run's directory and on each volume.
    """
    placed = {run: own_nbytes}
    for volume, nbytes in (volumes or {}).items():
        placed[volume] = placed.get(volume, 0) + nbytes
    devices = {path: _device_number(path) for path in placed}
    needed: dict[int | None, int] = {}
    for path, nbytes in placed.items():
        needed[devices[path]] = needed.get(devices[path], 0) + nbytes
    return tuple(_disk(path, needed[devices[path]]) for path in placed)


def volume_of(directory: str, checkpoint_id: str) -> str:
    """The volume that a directory of shards is on: a save makes ``VOLUME/RUN-DIGEST/ID`` there."""
    if os.path.basename(directory) != checkpoint_id:
        return directory
    return os.path.dirname(os.path.dirname(directory))


def _device_number(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None  # `_disk` says why


def _disk(path: str, checkpoint_nbytes: int) -> Disk:
    shown = shown_path(path)
    try:
        found = os.statvfs(path)
        device = find_device(path)
    except OSError as error:
        return Disk(shown, missing=error.strerror or str(error))
    mount = find_mount(path)
    free = found.f_bavail * found.f_frsize
    return Disk(
        path=shown,
        kind=shown_path(mount.kind),
        point=shown_path(mount.point),
        source=shown_path(mount.source),
        device=device,
        free_nbytes=free,
        all_nbytes=found.f_blocks * found.f_frsize,
        free_inodes=found.f_favail if found.f_files else None,
        fits=free // checkpoint_nbytes if checkpoint_nbytes else None,
        warnings=tuple(mount_advice(mount)),
    )
