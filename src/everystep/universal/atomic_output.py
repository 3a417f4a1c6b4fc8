"""A file or a directory that appears whole or not at all, and durable: what a conversion writes.

For a target ``P/NAME``, the directory ``P/.NAME.everystep-convert.partial`` is made and locked as the partial
directory of a checkpoint is (`everystep.store.commit.transaction`). The caller writes into it, and syncs
every file. Then the directory is renamed to ``NAME``, or the file in it is; and ``P`` is synced.

A kill before the rename leaves nothing that looks complete, and the next conversion to the target removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from everystep.engine import fs
from everystep.errors import CheckpointExists
from everystep.store import Transaction
from everystep.store.api import make_parent
from everystep.store.locks import remove_unlocked
from everystep.store.names import PARTIAL


class _Output(Transaction):
    """Replaces nothing: another process may have written the target before the rename."""

    def __init__(self, path: str) -> None:
        super().__init__(path, partial=_working_path(path))

    def found(self) -> Literal["nothing", "something else"]:
        return "something else" if fs.exists(self.target_entry) else "nothing"


@contextmanager
def output_file(path: str, *, overwrite: bool) -> Iterator[str]:
    """Yields the path to write a file to. It gets its name when the block ends without an error."""
    make_parent(path)
    with _Output(path) as output:
        output.make()
        refuse_file(path, overwrite=overwrite)
        name = os.path.basename(path)
        yield os.path.join(output.path, name)
        refuse_file(path, overwrite=overwrite)
        (fs.rename if overwrite else fs.rename_new)(output.directory.at(name), output.target_entry)
        fs.sync_dir(output.parent)
        output.abort()  # the directory is empty now


@contextmanager
def output_directory(path: str) -> Iterator[str]:
    """Yields the directory to write files to. It gets its name when the block ends without an error."""
    make_parent(path)
    with _Output(path) as output:
        output.make()
        refuse_directory(path)
        yield output.path
        fs.sync_dir(output.directory)
        if os.path.isdir(path):
            fs.rmdir(path)  # an empty one; fails if it no longer is
        output.publish()


def refuse_file(path: str, *, overwrite: bool) -> None:
    """`CheckpointExists` unless a file may be written there."""
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) or not os.path.isfile(path):
        raise CheckpointExists(f"{path} exists and is not a file: name another path")
    if not overwrite:
        raise CheckpointExists(
            f"{path} exists: choose another name, or overwrite=True (--force) to replace it"
        )


def refuse_directory(path: str) -> None:
    """`CheckpointExists` unless there is nothing, or an empty directory."""
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointExists(f"{path} exists: choose another path, or remove it")


def sweep(path: str) -> None:
    """Removes what a killed conversion to this path left. What another process holds stays."""
    working = _working_path(path)
    if os.path.isdir(working):
        remove_unlocked(working)


def _working_path(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.everystep-convert{PARTIAL}")
