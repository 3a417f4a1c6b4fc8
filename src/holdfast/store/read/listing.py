"""What a run holds: the steps of its committed checkpoints. Needs no lock."""

from __future__ import annotations

import errno
import os

from holdfast.errors import CheckpointNotFound, ReadFailed
from holdfast.store.names import is_step_name, step_of
from holdfast.store.os_errors import patiently, reading


def list_steps(run: str) -> list[int]:
    """Steps of the committed checkpoints, oldest first. Needs no lock."""
    try:
        names = patiently(lambda: _step_names(run))
    except ReadFailed as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFound(f"there is no run at {run}") from error
        raise
    return sorted(step_of(name) for name in names)


def _step_names(run: str) -> list[str]:
    with reading(run), os.scandir(run) as entries:
        return [entry.name for entry in entries if is_step_name(entry.name) and _is_directory(entry)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, or a link to one; a link that leads nowhere, or to itself, is none."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
