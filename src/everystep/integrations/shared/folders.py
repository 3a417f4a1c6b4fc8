"""Checkpoints in a folder of a framework (``checkpoint-500``): finding the newest intact one, and removing.

A `Checkpointer` does this for a run. Here the framework chooses the names.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Container, Iterable
from typing import Any

from everystep.caller import stack_level
from everystep.engine import fs
from everystep.errors import CorruptCheckpoint, EverystepError
from everystep.paths import local_path
from everystep.store import is_checkpoint, verify

_REMOVED = ".everystep-removed"


def numbered(folder: str, before: str) -> list[tuple[int, str]]:
    """The paths in a folder whose name is `before` and a number, in the order of the numbers."""
    there = os.listdir(folder) if os.path.isdir(folder) else []
    found = ((re.fullmatch(re.escape(before) + r"(\d+)", name), name) for name in there)
    return sorted((int(match[1]), os.path.join(folder, name)) for match, name in found if match)


def newest_intact(
    checkpoints: Iterable[tuple[int, str]], folder: str, foreign: Container[str] = ()
) -> str | None:
    """The path of the newest checkpoint whose bytes all verify; None if there is no checkpoint.

    `foreign`: those that the framework wrote by itself. They have no checksums, and are taken as they are.
    """
    # Other directories are from saves that did not finish, or are the framework's own.
    there = (path for _, path in sorted(checkpoints, reverse=True) if path in foreign or is_checkpoint(path))
    return first_intact(there, folder, lambda path: None if path in foreign else damage_of([path]))


def first_intact(paths: Iterable[str], folder: str, damage: Callable[[str], str | None]) -> str | None:
    """The first of these without damage, which `damage` describes. A warning names each damaged one.

    If all are damaged, that is an error: a training must not start from the beginning because of it.
    """
    reason = None
    for path in paths:
        found = damage(path)
        if found is None:
            return path
        reason = reason or found
        warnings.warn(f"passing over {path}: {found}", RuntimeWarning, stacklevel=stack_level())
    if reason is not None:
        raise CorruptCheckpoint(f"no checkpoint is intact: {reason}", path=folder)
    return None


def damage_of(checkpoints: Iterable[str]) -> str | None:
    """What is wrong with the first of these that is not intact. Reads all their bytes."""
    for path in checkpoints:
        try:
            for problem in verify(path).problems:
                leaf = "" if problem.leaf is None else f", leaf {problem.leaf!r}"
                return f"{problem.file}{leaf}: {problem.reason}"
        except EverystepError as error:
            return str(error)
    return None


def by_rank_zero(
    look: Callable[[], str | None], rank: int, broadcast: Callable[[list[Any]], list[Any]]
) -> str | None:
    """What rank 0 finds, on all ranks. If it fails, as when it finds only damage, all raise its error."""
    found: list[Any] = [None]
    if rank == 0:
        try:
            found = [look()]
        except (EverystepError, OSError) as error:
            found = [error]
    (result,) = broadcast(found)
    if isinstance(result, Exception):
        raise result
    path: str | None = result
    return path


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint: a directory, or a link or a file of the framework's own.

    It first gives a directory another name, under which no reader looks. The next removal removes what a kill
    leaves of it.
    """
    path = local_path(path)
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        folder = os.path.dirname(path)
        for name in os.listdir(folder):
            if name.endswith(_REMOVED):
                shutil.rmtree(os.path.join(folder, name))
        fs.rename(path, f"{path}{_REMOVED}")
        shutil.rmtree(f"{path}{_REMOVED}")
