"""From a path to a checkpoint that is held and whose manifest has been read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from everystep.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    EverystepError,
    IncompleteCheckpoint,
    OutOfResources,
)
from everystep.format.embedded import PEEK_NBYTES, embeds_root, extract_root
from everystep.format.manifest import MAX_ROOT_NBYTES, decode_root, shard_name
from everystep.format.records import Root
from everystep.format.shard import header_nbytes
from everystep.store.names import (
    MANIFEST,
    PARTIAL,
    RETIRED,
    SHARD,
    is_checkpoint_file,
    is_step_name,
    step_name,
)
from everystep.store.read import foreign
from everystep.store.read.listing import inner_checkpoints, is_checkpoint, list_steps, runs_in
from everystep.store.read.read_errors import open_stored, patiently, read_up_to, reading
from everystep.store.read.reader_lock import ReaderLock
from everystep.store.read.references import locate

_T = TypeVar("_T")

_MAX_REPLACED = 100
"""How often opening is retried because another checkpoint has taken its place."""
_SHOWN = 5
_MAX_PINNED = 32
"""Ranks whose files are kept within reach from the beginning. Each costs two descriptors; and with thousands
of ranks on both sides, a shared file system would get requests for every pair of them."""


def resolve(path: str | os.PathLike[str]) -> str:
    """The checkpoint that a path means: itself, the newest of a run, or the one of ``RUN@STEP``.

    If there is none, a checkpoint of another system is looked for.
    """
    where = locate(path)
    if where.endswith((PARTIAL, RETIRED)):
        raise IncompleteCheckpoint("this is not a committed checkpoint: the save did not finish", path=where)
    if is_checkpoint(where):
        return where
    require_reachable(where)
    if not os.path.isdir(where):
        if os.path.isfile(where):
            if foreign.recognises(where):
                return where
            raise CheckpointNotFound(f"there is no checkpoint at {where}: {foreign.looked_for(where)}")
        hint = "; a save to it did not finish" if os.path.isdir(where + PARTIAL) else ""
        raise CheckpointNotFound(f"there is no checkpoint at {where}{hint}")
    with reading(where):
        steps = list_steps(where)
    if steps:
        return os.path.join(where, step_name(steps[-1]))
    if foreign.recognises(where):
        return where
    with reading(where):
        raise _no_checkpoint(where)


def _no_checkpoint(where: str) -> EverystepError:
    """The error for a directory that is not a checkpoint or run. It says what to name instead."""
    named = inner_checkpoints(where)
    if named:
        return CheckpointNotFound(
            f"{where} is not one checkpoint, and not a run whose newest could be meant. It holds "
            f"{len(named)}: {_some(named)}. Name one of them, such as {os.path.join(where, named[-1])}"
        )
    if is_step_name(os.path.basename(where)) or any(map(is_checkpoint_file, os.listdir(where))):
        return IncompleteCheckpoint("the manifest is missing", path=where)
    runs = runs_in(where)
    if runs:
        example = os.path.join(where, runs[0])
        return CheckpointNotFound(
            f"{where} is not a run, but holds runs: {_some(runs)}. Name one of them, such as {example}"
        )
    others = foreign.checkpoints_in(where)
    if others:
        return CheckpointNotFound(
            f"{where} is not one checkpoint, but holds {len(others)} of other systems: {_some(others)}. "
            f"Name one of them, such as {os.path.join(where, others[-1])}"
        )
    return CheckpointNotFound(
        f"{where} is not a checkpoint, nor a run with one: it has no manifest and no checkpoints inside. "
        + foreign.looked_for(where)
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def require_reachable(where: str) -> None:
    """Raises `ReadFailed` if the path cannot be examined: it may exist all the same."""
    # ValueError: the text cannot be a path.
    with reading(where), contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        os.stat(os.path.join(where, MANIFEST))


def newest(path: str | os.PathLike[str], use: Callable[[str], _T]) -> _T:
    """Calls `use` with the checkpoint that a path means; again if it was retired from its run meanwhile."""
    for _ in range(_MAX_REPLACED):
        found = resolve(path)
        try:
            return use(found)
        except CheckpointNotFound:
            if found == os.path.abspath(os.fspath(path)) or resolve(path) == found:
                raise
    return use(resolve(path))


def hold_checkpoint(path: str) -> tuple[ReaderLock, Root]:
    """Holds a checkpoint and reads its manifest. Tries again if it is being replaced."""
    return patiently(partial(_open, path))


def hold_uncommitted(path: str) -> tuple[ReaderLock, Root]:
    """What a writer has sealed and not yet committed, for that writer itself."""
    hold = ReaderLock(path, uncommitted=True)
    try:
        return hold, _read_root(hold.directory, path)
    except BaseException:
        hold.close()
        raise


def _open(path: str) -> tuple[ReaderLock, Root]:
    for _ in range(_MAX_REPLACED):
        hold = ReaderLock(path)
        try:
            root = _read_root(hold.directory, path)
            complete = hold.pin(_to_pin(root))
            if hold.current or (complete and not root.parts):
                return hold, root
        except IncompleteCheckpoint:
            if hold.current:
                hold.close()
                raise
        except BaseException:
            hold.close()
            raise
        hold.close()
    raise CheckpointNotFound(
        f"{path} was replaced {_MAX_REPLACED} times while it was being opened; try again later"
    )


def _to_pin(root: Root) -> Iterator[str]:
    """The files that a reader may need: of each other rank its part and its first shard."""
    yield from (file.name for file in root.part.files if file.volume is None)
    for ref in root.parts[:_MAX_PINNED]:
        yield ref.file
        yield shard_name(ref.rank, 0)


def _read_root(directory: str, path: str) -> Root:
    """The manifest of the checkpoint at `path`: a file by itself, or else in the header of its only shard."""
    where = os.path.join(path, MANIFEST)
    with reading(where):
        try:
            opened = open_stored(f"{directory}/{MANIFEST}", where)
        except FileNotFoundError:
            opened = None
        if opened is not None:
            with opened as file:
                data = read_up_to(file, min(os.fstat(file.fileno()).st_size, MAX_ROOT_NBYTES) + 1)
    if opened is None:
        return _read_embedded(directory, path)
    root = decode_root(data, where)
    _refuse_second_manifest(directory, path)
    return root


def _read_embedded(directory: str, path: str) -> Root:
    where = os.path.join(path, SHARD)
    with reading(where):
        try:
            opened = open_stored(f"{directory}/{SHARD}", where)
        except FileNotFoundError as error:
            missing = os.path.join(path, MANIFEST)
            raise IncompleteCheckpoint("the manifest is missing", path=missing) from error
        with opened as file:
            nbytes = os.fstat(file.fileno()).st_size
            header = file.read(PEEK_NBYTES)
            header += file.read(max(0, header_nbytes(header, nbytes, where) - PEEK_NBYTES))
    return extract_root(header, nbytes, where)


def _refuse_second_manifest(directory: str, path: str) -> None:
    """Raises if there are two manifests: they might disagree. No writer makes such a checkpoint."""
    where = os.path.join(path, SHARD)
    try:
        with reading(where), open_stored(os.path.join(directory, SHARD), where) as file:
            beginning = file.read(PEEK_NBYTES)
    except EverystepError as error:
        if isinstance(error, OutOfResources):
            raise
        return  # a read of the shard will report what is wrong with it
    if embeds_root(beginning):
        reason = f"this file holds a manifest, and there is a {MANIFEST} beside it"
        raise CorruptCheckpoint(reason, path=os.path.join(path, SHARD))
