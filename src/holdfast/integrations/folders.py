"""Checkpoints in a folder of a framework (``checkpoint-500``): finding the newest intact one, and removing.

A `Checkpointer` does this for a run. Here the framework chooses the names.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.caller import stack_level
from holdfast.errors import CorruptCheckpoint
from holdfast.store import is_checkpoint, verify


def numbered(folder: str, before: str) -> list[tuple[int, str]]:
    """The paths in a folder whose name is `before` and a number, in the order of the numbers."""
    there = os.listdir(folder) if os.path.isdir(folder) else []
    found = ((re.fullmatch(re.escape(before) + r"(\d+)", name), name) for name in there)
    return sorted((int(match[1]), os.path.join(folder, name)) for match, name in found if match)


def newest_intact(checkpoints: Iterable[tuple[int, str]], folder: str) -> str | None:
    """The path of the newest checkpoint whose bytes all verify; None if there is no checkpoint.

    Damage is passed over with a warning. If all are damaged, that is an error: a training must not start
    from the beginning because of it.
    """
    damage = ""
    for step, path in sorted(checkpoints, reverse=True):
        if not is_checkpoint(path):
            continue  # a save that did not finish, or one of the framework's own
        problems = verify(path).problems
        if not problems:
            return path
        damage = "; ".join(f"{problem.file}: {problem.reason}" for problem in problems)
        warnings.warn(f"passing over step {step}: {damage}", RuntimeWarning, stacklevel=stack_level())
    if damage:
        raise CorruptCheckpoint(f"no checkpoint is intact: {damage}", path=folder)
    return None


def by_rank_zero(
    look: Callable[[], str | None], rank: int, broadcast: Callable[[list[Any]], list[Any]]
) -> str | None:
    """What rank 0 finds, on all ranks. If it finds only damage, all ranks raise that error."""
    found: list[Any] = [None]
    if rank == 0:
        try:
            found = [look()]
        except CorruptCheckpoint as error:
            found = [error]
    (result,) = broadcast(found)
    if isinstance(result, CorruptCheckpoint):
        raise result
    path: str | None = result
    return path


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint: a directory, or a link or a file of the framework's own."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        # Under a name that nobody looks for: what is left after a kill is no checkpoint.
        removed = f"{os.fspath(path).rstrip('/')}.removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(path, removed)
        shutil.rmtree(removed)
