"""What a directory holds: the steps of a run, and checkpoints of other names. Needs no lock."""

from __future__ import annotations

import errno
import os
import re

from everystep.errors import CheckpointNotFound, ReadFailed
from everystep.store.names import MANIFEST, PARTIAL, RETIRED, SHARD, is_step_name, step_of
from everystep.store.read.read_errors import patiently, reading

_PEEK_NBYTES = 4096
_FORMAT = b'"everystep/'


def list_steps(run: str) -> list[int]:
    """Steps of the committed checkpoints, oldest first. Needs no lock."""
    try:
        names = patiently(lambda: _step_names(run))
    except ReadFailed as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise no_run(run) from error
        raise
    return sorted(step_of(name) for name in names)


def no_run(path: str) -> CheckpointNotFound:
    """The error for a path at which there is no directory."""
    if os.path.isfile(path):
        return CheckpointNotFound(f"{path} is a file, not a run: a run is a directory of checkpoints")
    return CheckpointNotFound(f"there is no run at {path}")


def _step_names(run: str) -> list[str]:
    with reading(run), os.scandir(run) as entries:
        return [entry.name for entry in entries if is_step_name(entry.name) and _is_directory(entry)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a link to one. A link that leads nowhere, or to itself, is not."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def is_checkpoint(directory: str) -> bool:
    """Whether a directory looks like a checkpoint: it has a manifest, or a file that may hold it."""
    return os.path.exists(f"{directory}/{MANIFEST}") or os.path.exists(f"{directory}/{SHARD}")


def inner_checkpoints(directory: str) -> list[str]:
    """Names of the checkpoints directly in a directory that are not named by their step, sorted."""
    with reading(directory), os.scandir(directory) as entries:
        return sorted(
            (
                entry.name
                for entry in entries
                if not is_step_name(entry.name)
                and not entry.name.endswith((PARTIAL, RETIRED))
                and _is_directory(entry)
                and _is_ours(entry.path)
            ),
            key=natural_order,
        )


def runs_in(directory: str) -> list[str]:
    """Names of the runs directly in a directory that have a checkpoint, sorted."""
    with reading(directory), os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.name[0] != "." and _is_directory(entry)]
    return sorted((name for name in names if _has_steps(os.path.join(directory, name))), key=natural_order)


def _has_steps(directory: str) -> bool:
    try:
        return bool(_step_names(directory))
    except OSError:
        return False


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """For sorting names as people do: epoch-9 comes before epoch-10."""
    pieces = re.split(r"([0-9]+)", name)
    return tuple((int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces)


def _is_ours(directory: str) -> bool:
    """Whether it is a checkpoint. Other programs have files of the name manifest.json, too."""
    if os.path.exists(os.path.join(directory, SHARD)):
        return True
    try:
        with open(os.path.join(directory, MANIFEST), "rb") as file:
            return _FORMAT in file.read(_PEEK_NBYTES)
    except OSError:
        return False
