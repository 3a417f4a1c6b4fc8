"""Commits into existing directories: other files in them stay, whatever happens.

Owns what a save finds at its path, and two ways to commit there besides the rename of
`everystep.store.commit.transaction`. Both give files second names (hard links), so no file is without a name
at any moment.

If ``D`` holds no checkpoint (`link_into`), ``D`` itself stays. ``D.partial`` is whole and durable:

1. Sync the directory above ``D``: its maker may not have done so.
2. Every file of ``D.partial`` but the manifest gets a second name in ``D``. Sync ``D``.
3. The manifest gets its name in ``D``. **This is the commit.** (For a checkpoint of one file, that file.)
4. Sync ``D``. Remove ``D.partial``.

If a crash comes before step 3 reaches the disk, ``D.partial`` has the manifest and ``D`` does not. The next
writer recognizes the names of that save in ``D`` by their inodes and removes them (`take_back`).

If ``D`` holds a checkpoint, it is exchanged for ``D.partial`` (`carry_over`). Before the exchange, the other
files in ``D`` get second names in ``D.partial``. This is repeated after it, in case they changed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Literal

from everystep.engine import fs
from everystep.engine.fs import OpenDirectory
from everystep.errors import CheckpointExists
from everystep.store.names import MANIFEST, is_checkpoint_file, is_run_or_dcp_file

Found = Literal["nothing", "empty", "checkpoint", "others", "something else"]


def found_at(target: str, partial: str) -> Found:
    """What is at the path of a checkpoint. What an interrupted `link_into` has left there does not count.

    "others": a directory with other files or directories only. Runs, checkpoints of other systems, and files
    are "something else".
    """
    try:
        if not stat.S_ISDIR(os.lstat(target).st_mode):
            return "something else"
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    names = set(os.listdir(target))
    names.difference_update(_unsettled(target, partial, names))
    if any(map(is_checkpoint_file, names)):
        return "checkpoint"
    if any(map(is_run_or_dcp_file, names)):
        return "something else"
    return "others" if names else "empty"


def _unsettled(target: str, partial: str, names: set[str]) -> set[str]:
    """The names in a directory that an interrupted `link_into` has given."""
    if MANIFEST in names or not os.path.lexists(os.path.join(partial, MANIFEST)):
        return set()
    return {
        name
        for name in filter(is_checkpoint_file, names)
        if _same(os.path.join(target, name), os.path.join(partial, name))
    }


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except OSError:
        return False


def link_into(made: OpenDirectory, into: OpenDirectory, above: OpenDirectory) -> None:
    """Steps 1 to 4, but for the removal. When it raises, the names that it gave are taken back.

    `OSError` with ``into`` unchanged but for what could not be taken back: then `made` must stay.
    """
    names = sorted(
        filter(is_checkpoint_file, os.listdir(made.fileno())), key=lambda name: (name == MANIFEST, name)
    )
    given: list[str] = []
    fs.sync_dir(above)
    try:
        for name in names:
            if name == MANIFEST:
                fs.sync_dir(into)
            fs.link(made.at(name), into.at(name))
            given.append(name)
        fs.sync_dir(into)
    except BaseException:
        for name in reversed(given):
            fs.unlink(into.at(name))
        fs.sync_dir(into)
        raise


def take_back(made: OpenDirectory, into: OpenDirectory) -> None:
    """What a crash has left of a `link_into`, before its ``D.partial`` is removed."""
    here, there = set(os.listdir(made.fileno())), set(os.listdir(into.fileno()))
    if MANIFEST not in here or MANIFEST in there:
        return
    given = [
        name for name in filter(is_checkpoint_file, here & there) if _inode(made, name) == _inode(into, name)
    ]
    for name in given:
        fs.unlink(into.at(name))
    if given:
        fs.sync_dir(into)


def carry_over(old: OpenDirectory, new: OpenDirectory, owns: Callable[[str], bool]) -> None:
    """Gives the files in `old`, all but those that the checkpoint `owns`, a name in `new`, too, durably.

    A file that `new` has of that name from before is replaced. `CheckpointExists` for a directory: it cannot
    have two names.
    """
    changed = False
    for name in os.listdir(old.fileno()):
        if owns(name):
            continue
        info = os.stat(name, dir_fd=old.fileno(), follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            raise CheckpointExists(
                f"Checkpoint already exists: {old.path}. It contains the directory {name}, which a "
                "replacement would remove. Move that directory away, or choose another path"
            )
        if _inode(new, name) == (info.st_dev, info.st_ino):
            continue
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(new.at(name))
        fs.link(old.at(name), new.at(name))
        changed = True
    if changed:
        fs.sync_dir(new)


def _inode(directory: OpenDirectory, name: str) -> tuple[int, int] | None:
    try:
        info = os.stat(name, dir_fd=directory.fileno(), follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino
