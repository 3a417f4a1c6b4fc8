"""The rules of a run (`Keep`), recorded in its directory: ``everystep prune`` follows them.

A Checkpointer records them with its first save. Nothing syncs the file, and no failure to write it fails a
save: a file that is missing, torn or of a newer version is no rule, and then `prune` asks for one.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import asdict, fields

import msgspec

from everystep.checkpointer.events import warn
from everystep.checkpointer.keep import Keep
from everystep.engine import fs
from everystep.engine.atomic_file import replace_file
from everystep.engine.fs import OpenDirectory
from everystep.store.names import RULES

_MAX_NBYTES = 64 << 10
_FIELDS = {field.name for field in fields(Keep)}


def record_rules(run: OpenDirectory, keep: Keep) -> None:
    """Called by the run's writer."""
    data = _encoded(keep)
    if _read(run.fileno()) == data:
        return
    try:
        replace_file(RULES, data, within=run, synced=False)
    except OSError as error:
        with contextlib.suppress(OSError):  # older rules must not pass for these
            fs.unlink(run.at(RULES))
        warn(f"the rules of {run.path} were not recorded, so `everystep prune` will ask for them: {error}")


def recorded_rules(run: str) -> Keep | None:
    """The rules by which the last training that saved into a run keeps its checkpoints; None if unknown."""
    try:
        directory = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = _read(directory)
    finally:
        os.close(directory)
    return None if data is None else _decoded(data)


def _read(directory: int) -> bytes | None:
    try:
        with open(fs.open_regular(RULES, directory), "rb") as opened:
            return opened.read(_MAX_NBYTES)
    except OSError:
        return None


def _encoded(keep: Keep) -> bytes:
    """Numbers of any library as those of Python. JSON has no infinity."""
    rules = asdict(keep)
    rules["last"] = int(keep.last)
    rules["every"] = None if keep.every is None else int(keep.every)
    if keep.best is not None:
        metric, direction, count = keep.best
        rules["best"] = (metric, direction, int(count))
    if keep.seconds is not None:
        rules["seconds"] = "inf" if math.isinf(keep.seconds) else float(keep.seconds)
    return msgspec.json.encode(rules) + b"\n"


def _decoded(data: bytes) -> Keep | None:
    try:
        rules = msgspec.json.decode(data, type=dict[str, object])
        if rules.keys() != _FIELDS:  # a rule of a newer version: without it, too much would go
            return None
        if rules["seconds"] == "inf":
            rules["seconds"] = math.inf
        return msgspec.convert(rules, Keep)
    except (msgspec.MsgspecError, ValueError):
        return None
