"""What DCP calls a checkpoint's id: here, the path of its directory."""

from __future__ import annotations

import os

from everystep.paths import local_path


def path_of(checkpoint_id: str | os.PathLike[str]) -> str:
    """The directory that is meant; `UnsupportedURL` (a ValueError) for a URL."""
    return local_path(checkpoint_id)


def valid_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint could be there: a path, and one below a directory that can be written."""
    try:
        at = path_of(checkpoint_id)
    except (TypeError, ValueError):
        return False
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    return os.path.isdir(at) and os.access(at, os.W_OK | os.X_OK)
