"""The directory that DeepSpeed saves to: tags that appear at once and whole, and the file ``latest``.

In a tag ``T``, each of DeepSpeed's files is a directory with an Everystep checkpoint. All of them are written
to ``.T.partial`` first, which gets its name last, in a transaction of `everystep.store.commit`. Nothing here
needs DeepSpeed.
"""

from __future__ import annotations

import contextlib
import os
from typing import Literal

from everystep.engine import fs
from everystep.engine.atomic_file import replace_file
from everystep.errors import EverystepError
from everystep.store import Transaction
from everystep.store import open as open_checkpoint
from everystep.store.locks import remove_unlocked
from everystep.universal.deepspeed.names import LATEST, STATES


def partial_of(path: str) -> str:
    """Where a tag is until it gets its name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.partial")


class TagTransaction(Transaction):
    """A tag on its way to its name. It replaces an older one; files there that are not DeepSpeed's stay."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag, partial=partial_of(tag), overwrite=True)

    def owns(self, name: str) -> bool:
        return name.endswith(STATES)

    def found(self) -> Literal["nothing", "checkpoint", "something else"]:
        if not fs.exists(self.target_entry):
            return "nothing"
        return (
            "something else"
            if os.path.islink(self.target) or not os.path.isdir(self.target)
            else "checkpoint"
        )

    def commit(self) -> None:
        """Gives the tag its name, if it has files: all of them are durable."""
        if os.listdir(self.directory.fileno()):
            fs.sync_dir(self.directory)
            self.publish()
        else:
            self.abort()


def sweep(folder: str) -> None:
    """Makes the directory for tags, and removes what killed saves have left there."""
    fs.make_directories(folder)
    left = [name for name in os.listdir(folder) if name.startswith(".") and name.endswith(".partial")]
    if left:
        fs.sync_dir(folder)  # one may be a tag that was replaced: the names come before its files
    for name in left:
        with contextlib.suppress(NotADirectoryError):
            remove_unlocked(os.path.join(folder, name))


def write_latest(folder: str, tag: str) -> None:
    """Names the newest tag, durably: the file has the old content or the new one, never none."""
    opened = fs.open_directory(folder)
    try:
        replace_file(LATEST, tag.encode(), within=opened)
    finally:
        opened.release()


def read_latest(folder: str) -> str | None:
    """The tag that ``latest`` names; None if there is no such file, or nothing in it."""
    try:
        with open(os.path.join(folder, LATEST), encoding="utf-8") as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None


def files_of(tag: str) -> list[str]:
    """The files of a tag that are Everystep checkpoints. None are if DeepSpeed itself wrote the tag."""
    if not os.path.isdir(tag):
        return []
    found = (os.path.join(tag, name) for name in sorted(os.listdir(tag)) if name.endswith(STATES))
    return [path for path in found if os.path.isdir(path)]


def newest_first(folder: str) -> list[str]:
    """The paths of tags: first the one that ``latest`` names, then ours by step. None without ``latest``.

    Those whose step cannot be read are left out.
    """
    newest = read_latest(folder)
    if newest is None:
        return []
    found: list[tuple[int, float, str]] = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(".") or not os.path.isdir(path):
            continue
        for file in files_of(path)[:1]:
            with contextlib.suppress(EverystepError), open_checkpoint(file) as opened:
                found.append((opened.step, opened.created, path))
    return list(dict.fromkeys([os.path.join(folder, newest), *(path for *_, path in sorted(found)[::-1])]))
