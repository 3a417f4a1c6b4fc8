"""A new shelf: complete under its path, or not there at all."""

from __future__ import annotations

import contextlib
import os
import secrets

from everystep import engine
from everystep.engine import fs
from everystep.engine.atomic_file import replace_file


def create(path: str, limit_nbytes: int) -> None:
    """Makes an empty shelf. If another process makes one at the same time, either serves."""
    with contextlib.suppress(FileExistsError):
        replace_file(path, engine.empty_shelf(secrets.randbits(64), limit_nbytes), overwrite=False)
    directory = os.path.dirname(os.path.abspath(path))
    fs.sync_dir(directory)  # also if another process made it
    fs.anchor(directory, once=True)


def medium_of_directory(directory: str) -> str:
    """The medium that a shelf in a directory would have, found by trying it.

    With the instruction that writes processor caches back, where that is what commits do.
    """
    trial = os.path.join(directory, f".everystep-{secrets.token_hex(8)}.partial")
    try:
        with fs.write_file(trial, bytes(4096)):
            pass
        medium = engine.shelf_medium(trial)
    except OSError as error:
        return f"unknown: {error.strerror or error}"
    finally:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(trial)
    if medium == "persistent memory":
        return f"{medium} (MAP_SYNC, {engine.write_back_instruction()})"
    return f"{medium} ({'not durable' if medium == 'memory' else 'written and synced'})"
