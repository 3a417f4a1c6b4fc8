"""Directories of many torch files, out of leaves: written in parallel, in bounded memory, and synced.

Small files are put together in memory, many at a time, and written at once. A large one streams to the disk.
Leaves may be cast, and cut for one rank of a target (`LeafBytes.plan`).

To sync thousands of files one after another would take longer than writing them. So the kernel starts
writing when a file is complete, and one thread of ours syncs them while others write the next ones: a
sync then finds little to do, and files share the commits of the file system's journal. ``syncfs`` would be
one call, but would also wait for what other programs have written to the same file system, however much that
is.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everystep.engine import Memory, fs
from everystep.engine.fs import PendingFile
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box, whole
from everystep.state import Node, unflatten
from everystep.state.node import LEAF, TENSOR, blob_names, localized, tensor_body
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.requests import BoxRequest
from everystep.store.stream.element_casts import cast
from everystep.store.stream.leaf_stream import LeafStream, StreamedLeaf
from everystep.store.stream.leaf_windows import WINDOW_NBYTES
from everystep.universal.items import Job
from everystep.universal.split import LocalPlan
from everystep.universal.torch_file.pickle_writer import FlaggedTensor, PendingTensor, pickled
from everystep.universal.torch_file.zip_writer import Fill, TorchArchive, assemble, stream

_BATCH_NBYTES = 16 << 20
_STREAMED_NBYTES = 48 << 20
"""Files that are larger stream; each worker holds at most one such file, or one batch, in memory."""
_WORKERS = 3
"""One reads, one computes checksums, one writes: more did not help, and each has a batch in memory."""
_UNSYNCED = 8
"""Batches that wait for their sync. Each keeps its files open."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class LeafBytes:
    """Where the bytes of a tensor come from: a stored leaf, all of it or what a plan says."""

    stored: str
    plan: LocalPlan | None = None


def leaf_tensor(
    checkpoint: Checkpoint, stored: str, dtype: str | None = None, plan: LocalPlan | None = None
) -> PendingTensor:
    """A tensor of a file that gets the elements of a leaf, cast to a type, or what a plan says of them."""
    info = checkpoint._parts.leaf_infos[stored]
    shape = info.shape if plan is None else plan.shape
    return PendingTensor(dtype or info.dtype, shape, LeafBytes(stored, plan))


def pending_state(job: Job, *, keep_flags: bool = False) -> tuple[Any, dict[str, PendingTensor]]:
    """The state that a conversion writes, with tensors whose bytes come later, and these by their names.

    `keep_flags`: parameters, and tensors that require gradients, are a `FlaggedTensor`.
    """
    tensors = {item.name: leaf_tensor(job.checkpoint, item.stored, item.dtype) for item in job.items}
    tensors |= {name: tensors[of] for name, of in job.tied.items()}
    tree = localized(job.tree, job.local)
    names = list(blob_names(tree))
    arrays: dict[str, Any] = {**tensors, **(job.checkpoint.read(names) if names else {})}
    flagged: dict[tuple[int, bool, bool], FlaggedTensor] = {}

    def without_flags(node: Node) -> Node:
        if isinstance(node, list):
            return [without_flags(item) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) != 1 or TENSOR not in node:
            return {key: without_flags(value) for key, value in node.items()}
        name, is_parameter, requires_grad = tensor_body(node[TENSOR])
        if keep_flags:
            tensor = tensors[name]
            made = FlaggedTensor(tensor, is_parameter, requires_grad)
            while name in arrays:
                name += "'"
            arrays[name] = flagged.setdefault((id(tensor), is_parameter, requires_grad), made)
        return {LEAF: name}

    return unflatten(without_flags(tree), arrays, where=job.checkpoint.path), tensors


class TorchFile:
    """A file to be written: its place below a directory, and the object that ``torch.load`` gives."""

    def __init__(self, name: str, content: object, *, weights_only: bool = False) -> None:
        self.name = name
        data, self.tensors = pickled(content, weights_only=weights_only)
        self.archive = TorchArchive(data, [tensor.nbytes for tensor in self.tensors])

    @property
    def nbytes(self) -> int:
        return self.archive.nbytes

    @property
    def data_nbytes(self) -> int:
        return sum(self.archive.sizes)

    @property
    def is_cut(self) -> bool:
        """Whether a tensor is computed from a leaf, and not all of it."""
        return any(tensor.origin is not None and tensor.origin.plan is not None for tensor in self.tensors)


def write_files(
    checkpoint: Checkpoint,
    directory: str,
    files: Sequence[TorchFile],
    progress: Callable[[int], None],
) -> None:
    """Writes files below a directory, durable on return, but for the name of the directory itself.

    One thread at a time calls `progress` with the bytes written since the last call.
    """
    folders = _make_folders(directory, files)
    writer = _BatchWriter(checkpoint, directory, progress)
    with ThreadPoolExecutor(_WORKERS, "everystep-write") as pool, writer:
        running = [pool.submit(writer.write, batch) for batch in _batches(files)]
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        for future in running:
            future.cancel()
        for future in done:
            future.result()
    for folder in folders:
        fs.sync_dir(folder)


def _make_folders(directory: str, files: Sequence[TorchFile]) -> list[str]:
    """Makes the directories of all files. Gives those that hold directories, which no file's sync covers."""
    made: dict[str, None] = {}
    for file in files:
        parts = file.name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            made.setdefault(os.path.join(directory, *parts[:depth]))
    for folder in made:
        fs.mkdir(folder)
    return [directory, *dict.fromkeys(os.path.dirname(folder) for folder in made if folder)]


def _batches(files: Sequence[TorchFile]) -> Iterator[list[TorchFile]]:
    """The large ones first, each by itself: they take longest."""
    yield from ([file] for file in files if file.nbytes > _STREAMED_NBYTES)
    gathered: list[TorchFile] = []
    nbytes = 0
    for file in files:
        if file.nbytes > _STREAMED_NBYTES:
            continue
        if gathered and nbytes + file.nbytes > _BATCH_NBYTES:
            yield gathered
            gathered, nbytes = [], 0
        gathered.append(file)
        nbytes += file.nbytes
    if gathered:
        yield gathered


class _BatchWriter:
    """Writes batches, called by several threads; owns the thread that syncs."""

    def __init__(self, checkpoint: Checkpoint, directory: str, progress: Callable[[int], None]) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._progress = progress
        self._lock = threading.Lock()
        self._cutting = threading.Lock()
        """Held by the one large file whose tensors are cut: each is whole in memory while it is written."""
        self._syncing = ThreadPoolExecutor(1, "everystep-sync")
        self._room = threading.Semaphore(_UNSYNCED)
        self._synced: list[Future[None]] = []
        self._stopped = False

    def __enter__(self) -> _BatchWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = self._stopped or kind is not None
        self._syncing.shutdown(wait=True)
        if kind is None:
            for future in self._synced:
                future.result()

    def write(self, batch: list[TorchFile]) -> None:
        if self._stopped:
            return
        try:
            if batch[0].nbytes > _STREAMED_NBYTES:
                with self._cutting if batch[0].is_cut else nullcontext():
                    self._stream(batch[0])
            else:
                self._write_small(batch)
        except BaseException:
            self._stopped = True
            raise

    def _write_small(self, batch: list[TorchFile]) -> None:
        buffers: list[Bytes] = [np.empty(file.nbytes, np.uint8) for file in batch]
        _fill_buffers(self._checkpoint, batch, buffers)
        by_folder: dict[str, list[PendingFile]] = {}
        for file, buffer in zip(batch, buffers, strict=True):
            assemble(file.archive, buffer)
            path = os.path.join(self._directory, file.name)
            written = fs.write_file(path, buffer.data)
            by_folder.setdefault(os.path.dirname(path), []).append(written)
            self._advance(file.data_nbytes)
        self._room.acquire()
        self._synced.append(self._syncing.submit(self._sync, by_folder))

    def _sync(self, by_folder: dict[str, list[PendingFile]]) -> None:
        try:
            for folder, written in by_folder.items():
                if self._stopped:
                    return
                fs.sync(written, folder)
        except BaseException:
            self._stopped = True
            raise
        finally:
            for written in by_folder.values():
                for file in written:
                    file.close()
            self._room.release()

    def _stream(self, file: TorchFile) -> None:
        path = os.path.join(self._directory, file.name)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            now = min(nbytes, file.data_nbytes)
            self._advance(now - done)
            done = now

        leaves = [
            StreamedLeaf(tensor.origin.stored, tensor.dtype)
            for tensor in file.tensors
            if tensor.origin is not None and tensor.origin.plan is None
        ]
        with LeafStream(self._checkpoint, leaves) as whole_leaves:
            fills: list[Fill] = []
            number = 0
            for tensor in file.tensors:
                if tensor.origin is not None and tensor.origin.plan is None:
                    fills.append(whole_leaves.source(number).fill)
                    number += 1
                else:
                    fills.append(_cut_fill(self._checkpoint, tensor))
            stream(path, file.archive, fills, advance)
        advance(file.nbytes)
        fs.sync_dir(os.path.dirname(path))

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._progress(nbytes)


def _cut_fill(checkpoint: Checkpoint, tensor: PendingTensor) -> Fill:
    """Bytes of a tensor that is computed whole, and kept until its last byte has passed."""
    kept: list[Bytes] = []

    def fill(window: memoryview, offset: int) -> None:
        if not kept:
            kept.append(np.empty(tensor.nbytes, np.uint8))
            for read in _reads(checkpoint, tensor, kept[0]):
                for slab in _slabs(read):
                    _carry_out(checkpoint, [slab])
        window[:] = kept[0][offset : offset + len(window)].data
        if offset + len(window) == tensor.nbytes:
            kept.clear()

    return fill


@dataclass(frozen=True, slots=True)
class _Read:
    """A box of a leaf that is read, cast and put in its `place`, which has a last dimension of bytes."""

    stored: str
    box: Box
    dtype: str
    to: str
    place: Bytes


def _fill_buffers(checkpoint: Checkpoint, files: list[TorchFile], buffers: list[Bytes]) -> None:
    reads: list[_Read] = []
    for file, buffer in zip(files, buffers, strict=True):
        for tensor, at in zip(file.tensors, file.archive.offsets, strict=True):
            reads += _reads(checkpoint, tensor, buffer[at : at + tensor.nbytes])
    _carry_out(checkpoint, reads)


def _reads(checkpoint: Checkpoint, tensor: PendingTensor, place: Bytes) -> Iterator[_Read]:
    """What has to be read for a tensor whose bytes are to be at `place`. Padding is zeroed at once."""
    origin = tensor.origin
    if not tensor.nbytes:
        return
    if origin is None:
        place[:] = 0
        return
    info = checkpoint.leaves[origin.stored]
    size = itemsize(tensor.dtype)
    if origin.plan is None:
        yield _Read(
            origin.stored, whole(info.shape), info.dtype, tensor.dtype, place.reshape(*info.shape, size)
        )
        return
    cut = place.reshape(*tensor.shape, size)
    for zeros in origin.plan.zeros:
        cut[_slices(zeros)] = 0
    for move in origin.plan.moves:
        yield _Read(origin.stored, move.source, info.dtype, tensor.dtype, cut[_slices(move.local)])


def _slabs(read: _Read) -> Iterator[_Read]:
    """The same cut along the first dimension, so that about a window is read at once."""
    box, size = read.box, itemsize(read.dtype)
    if not box.shape or read.place.shape[:-1] != box.shape:
        yield read
        return
    rows = max(1, WINDOW_NBYTES // (size * math.prod(box.shape[1:])))
    for first in range(0, box.shape[0], rows):
        part = Box((box.start[0] + first, *box.start[1:]), (min(rows, box.shape[0] - first), *box.shape[1:]))
        yield replace(read, box=part, place=read.place[first : first + rows])


def _carry_out(checkpoint: Checkpoint, reads: Sequence[_Read]) -> None:
    requests: list[BoxRequest] = []
    casts: list[tuple[_Read, Bytes]] = []
    for read in reads:
        memory = read.place
        if read.dtype != read.to or not memory.flags.c_contiguous:
            memory = np.empty(read.box.volume * itemsize(read.dtype), np.uint8)
            casts.append((read, memory))
        requests.append(BoxRequest(read.stored, read.box, Memory(memory.ctypes.data, memory.nbytes, memory)))
    checkpoint._reader.fetch(requests)
    for read, memory in casts:
        read.place[...] = cast(memory, read.dtype, read.to).reshape(read.place.shape)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(box.start, box.shape, strict=True))
