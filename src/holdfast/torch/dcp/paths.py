"""What DCP calls a checkpoint's id: here, the path of its directory."""

from __future__ import annotations

import os


def path_of(checkpoint_id: str | os.PathLike[str]) -> str:
    """The directory that is meant; `ValueError` for an address of something else than a file system."""
    path = os.fspath(checkpoint_id)
    if "://" in path:
        raise ValueError(f"{path}: Holdfast writes to file systems only; give the path of a directory")
    return os.path.abspath(path)


def valid_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint could be there: a path, and one below a directory that can be written."""
    try:
        at = path_of(checkpoint_id)
    except (TypeError, ValueError):
        return False
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    return os.path.isdir(at) and os.access(at, os.W_OK | os.X_OK)
