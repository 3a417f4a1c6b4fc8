"""Writing leaves of a checkpoint as one safetensors file: streamed, verified, all or nothing.

1. Write a temporary file beside the target, a window of leaves at a time, each checked against its checksums.
2. Sync it. 3. Rename it to the target. 4. Sync the directory.

A failure before the rename leaves the target as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast import engine
from holdfast.engine import ALIGNMENT, SAVING, Memory, Produced, WritePiece, fs
from holdfast.errors import CheckpointExists, EngineTimeout
from holdfast.format.dtypes import carrier, itemsize
from holdfast.format.shard import HeaderEntry, build_header, entry_name
from holdfast.inspect.leaf_windows import Bytes, Extent, Span, WindowReader, windows
from holdfast.inspect.progress import Progress, no_progress
from holdfast.store import Checkpoint, is_checkpoint
from holdfast.store import open as open_checkpoint
from holdfast.store.names import PARTIAL, RETIRED
from holdfast.store.os_errors import saving

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote. `tied`: names left out because another name in the file has the same bytes."""

    path: str
    step: int
    leaves: int
    nbytes: int
    tied: dict[str, str]


def export(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    select: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Writes leaves of a checkpoint (of a run: its newest) as one safetensors file, durable on return.

    `select`: globs; only the leaves that match any of them are written. Tied leaves are written once, under
    their first name; the others are listed in the file's metadata, next to the step. Every byte is verified
    on the way. `holdfast.CheckpointExists` if `output` exists, unless `force`.
    """
    with open_checkpoint(path) as checkpoint:
        chosen = checkpoint.select(list(select)) if select else list(checkpoint.leaves)
        return _Export(checkpoint, chosen).write(os.path.abspath(output), force=force, progress=progress)


class _Export:
    """The leaves to be written: every stored leaf once, under the first of its chosen names."""

    def __init__(self, checkpoint: Checkpoint, chosen: Sequence[str]) -> None:
        self._checkpoint = checkpoint
        self._names: dict[str, str] = {}
        self._tied: dict[str, str] = {}
        for name in chosen:
            stored = checkpoint.leaves[name].alias_of or name
            if stored in self._names:
                self._tied[name] = self._names[stored]
            else:
                self._names[stored] = name
        # Wide elements first: then each tensor is aligned to its own size, as readers that map files like it.
        self._order = sorted(
            self._names,
            key=lambda stored: itemsize(carrier(checkpoint.leaves[stored].dtype).name),
            reverse=True,
        )
        self._header = self._build_header()

    @property
    def nbytes(self) -> int:
        return len(self._header) + sum(self._checkpoint.leaves[name].nbytes for name in self._order)

    def write(self, path: str, *, force: bool, progress: Progress) -> Exported:
        """Writes the file; when this returns it is durable."""
        with saving(path):
            _refuse(path, force)
            _refuse_own(path, self._checkpoint)
            directory = os.path.dirname(path)
            temporary = os.path.join(directory, f".holdfast-export-{uuid.uuid4().hex[:12]}.partial")
            try:
                self._write(temporary, progress)
                _refuse(path, force)
                fs.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            fs.sync_dir(directory)
        return Exported(path, self._checkpoint.step, len(self._order), self.nbytes, self._tied)

    def _write(self, path: str, progress: Progress) -> None:
        header = np.frombuffer(self._header, np.uint8)
        pieces = [WritePiece(0, Memory(header.ctypes.data, len(header), header))]
        at = len(header)
        leaves = (self._checkpoint.leaves[name] for name in self._order)
        reader = WindowReader(self._checkpoint)
        for spans in windows(Extent(leaf.nbytes, itemsize(leaf.dtype)) for leaf in leaves):
            window = _Window(reader, spans, self._order)
            pieces.append(WritePiece(at, Produced(window.nbytes, window.fill)))
            at += window.nbytes
        tuning = replace(SAVING, backend=engine.choose_backend(os.path.dirname(path)))
        # Direct I/O wants whole blocks, and readers the exact size: the zeros at the end are cut off again.
        job = engine.write(path, -(-at // ALIGNMENT) * ALIGNMENT, pieces, tuning=tuning)
        try:
            while not _finished(job):
                progress(job.progress, self.nbytes)
        except BaseException:
            job.cancel()
            raise
        os.truncate(path, at)
        fs.sync([job])

    def _build_header(self) -> bytes:
        entries = []
        at = 0
        foreign: dict[str, str] = {}
        for stored in self._order:
            leaf = self._checkpoint.leaves[stored]
            name = self._names[stored]
            carried = carrier(leaf.dtype)
            if carried.name != leaf.dtype:
                foreign[name] = leaf.dtype
            shape = (*leaf.shape, *carried.tail)
            entries.append(HeaderEntry(entry_name(name), carried.name, shape, at, at + leaf.nbytes))
            at += leaf.nbytes
        return build_header(entries, self._metadata(foreign))

    def _metadata(self, foreign: dict[str, str]) -> dict[str, str]:
        found = self._checkpoint
        from_torch = any(found.leaves[stored].framework == "torch" for stored in self._order)
        metadata = {
            "format": "pt"
            if from_torch or not self._order
            else "np",  # tools of the Hugging Face family ask for it
            "holdfast.step": str(found.step),
            "holdfast.id": found.id,
        }
        if self._tied:
            metadata["holdfast.tied"] = json.dumps(self._tied)
        if foreign:
            # safetensors has no name for these types; the file holds their bytes under another one.
            metadata["holdfast.dtypes"] = json.dumps(foreign)
        return metadata


class _Window:
    """Some bytes of the file, read when the engine comes to them and given out in the pieces it asks for."""

    def __init__(self, reader: WindowReader, spans: Sequence[Span], names: Sequence[str]) -> None:
        self._reader = reader
        self._spans = spans
        self._names = names
        self._data: Bytes | None = None
        self.nbytes = sum(span.nbytes for span in spans)

    def fill(self, window: memoryview, offset: int) -> None:
        if self._data is None:
            self._data = self._reader.read(self._spans, self._names)
        window[:] = self._data[offset : offset + len(window)].data
        if offset + len(window) == self.nbytes:
            self._data = None  # the engine goes through a file in order


def _finished(job: engine.WriteJob) -> bool:
    try:
        job.wait(_POLL_SECONDS)
    except EngineTimeout:
        return False
    return True


def _refuse(path: str, force: bool) -> None:
    """Raises unless a file may be written there: only files are replaced, and none in a checkpoint."""
    directory = os.path.realpath(os.path.dirname(path))
    if is_checkpoint(directory) or directory.endswith((PARTIAL, RETIRED)):
        raise CheckpointExists(
            f"{path} is inside of a checkpoint, and checkpoints are immutable: choose another place"
        )
    if not os.path.lexists(path):
        return
    if os.path.isdir(path):
        raise CheckpointExists(f"{path} is a directory: name a file to write")
    # A dangling link may be replaced, too: the name is replaced, not the target of the link.
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointExists(f"{path} is not a regular file, so it is not replaced: choose another name")
    if not force:
        raise CheckpointExists(f"{path} exists: choose another name, or force (--force) to replace it")


def _refuse_own(path: str, checkpoint: Checkpoint) -> None:
    """Shards may lie on volumes, in directories that look like no checkpoint."""
    if not os.path.exists(path) or os.path.islink(path):
        return
    for part in checkpoint.parts:
        reader = checkpoint.reader(part.rank)
        for file in part.files:
            stored = reader.path(file)
            if os.path.exists(stored) and os.path.samefile(path, stored):
                raise CheckpointExists(f"{path} is a file of the checkpoint to export: name another")
