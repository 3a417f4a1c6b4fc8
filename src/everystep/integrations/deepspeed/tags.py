"""The directory that DeepSpeed saves to: tags that appear at once and whole, and the file ``latest``.

In a tag ``T``, each of DeepSpeed's files is a directory with an Everystep checkpoint. All of them are written
to ``.T.partial`` first. `publish` renames that; before it, there is no ``T``. Nothing here needs DeepSpeed.
"""

from __future__ import annotations

import contextlib
import os

from everystep.engine import fs
from everystep.errors import CheckpointExists, EverystepError
from everystep.store import open as open_checkpoint
from everystep.universal.deepspeed.names import LATEST, STATES


def partial_of(path: str) -> str:
    """Where something is until it gets its name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.partial")


def begin(tag: str) -> str:
    """Makes the directory for the files of a tag, and removes what killed saves have left beside it."""
    folder, partial = os.path.dirname(tag), partial_of(tag)
    fs.make_directories(folder)
    for name in os.listdir(folder):
        left = os.path.join(folder, name)
        if name.startswith(".") and name.endswith(".partial") and os.path.isdir(left):
            fs.remove_tree(left)
    fs.mkdir(partial)
    return partial


def publish(tag: str) -> None:
    """The commit: ``.T.partial``, with files that are durable, becomes ``T``. One without files goes away.

    An older ``T`` is replaced in the same moment. Files in it that are not DeepSpeed's stay.
    """
    partial = partial_of(tag)
    if not os.listdir(partial):
        fs.rmdir(partial)
        return
    replaces = fs.exists(tag)
    if replaces:
        _carry_over(tag, partial)
    fs.sync_dir(partial)
    (fs.exchange if replaces else fs.rename_new)(partial, tag)
    fs.sync_dir(os.path.dirname(tag))
    if replaces:
        with contextlib.suppress(OSError):  # the commit stands, and the next save sweeps this
            fs.remove_tree(partial)


def _carry_over(old: str, new: str) -> None:
    for name in os.listdir(old):
        if name.endswith(STATES):
            continue
        if os.path.isdir(os.path.join(old, name)):
            raise CheckpointExists(
                f"{old} exists and has the directory {name}, which is not DeepSpeed's: to replace the tag "
                "would remove it. Move it away, or choose another tag"
            )
        fs.link(os.path.join(old, name), os.path.join(new, name))


def write_latest(folder: str, tag: str) -> None:
    """Names the newest tag, durably: the file has the old content or the new one, never none."""
    path = os.path.join(folder, LATEST)
    partial = partial_of(path)
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(partial)
    with fs.write_file(partial, tag.encode()) as file:
        fs.sync([file])
    fs.rename(partial, path)
    fs.sync_dir(folder)


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
    """The paths of tags: that which ``latest`` names, then ours by their steps. None without ``latest``.

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
