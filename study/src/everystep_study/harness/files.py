"""What every way to checkpoint needs of files and packages: syncing, listing, removing; what is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def missing_modules(*names: str) -> str | None:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(absent)}" if absent else None


def missing_everystep() -> str | None:
    """Why Everystep itself cannot run: a checkout whose native engine was never built."""
    try:
        from everystep import Checkpointer, Keep, load, save  # noqa: F401
    except ImportError as error:
        return f"the engine is not built ({error})"
    return None


def sync_tree(path: Path) -> None:
    """Make `path` durable: every file below it, every directory, and the entry that names it."""
    if path.is_dir():
        for parent, _, files in os.walk(path, topdown=False):
            for name in files:
                sync(Path(parent, name))
            sync(Path(parent))
    else:
        sync(path)
    sync(path.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_below(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return [Path(parent, name) for parent, _, files in os.walk(path) for name in files]
    return [path] if path.exists() else []


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
