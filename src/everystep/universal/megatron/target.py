"""Megatron's directories: ``iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt`` for each rank of a layout.

A spec says how each parameter is cut; without one, the preset ``megatron-gpt`` does. The optimizer's state is
cut as its parameter. Layers are cut over pipeline stages; what is named as an embedding goes to the first
stage, other parameters to the last. A padded vocabulary gets a multiple of
``make_vocab_size_divisible_by`` rows on each rank (128, if the source does not say).

One rank's tensor is in memory at a time. `megatron_ranks` owns which tensor goes into which file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from everystep.engine import Memory, fs
from everystep.errors import StateMismatch
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box
from everystep.store.read.requests import BoxRequest
from everystep.store.stream.element_casts import cast
from everystep.store.stream.leaf_windows import WINDOW_NBYTES, Bytes
from everystep.universal.atomic_output import output_directory, refuse_directory
from everystep.universal.items import MODEL, Item, Job, OutputFile
from everystep.universal.megatron.target_ranks import OPTIMIZER, Ranks, state_name
from everystep.universal.opening import ForeignCheckpoint
from everystep.universal.readback import compare_copies, compare_written
from everystep.universal.recognition import describe
from everystep.universal.split import LocalPlan
from everystep.universal.torch_file.pickle_writer import PendingTensor, pickled
from everystep.universal.torch_file.zip_format import TorchArchive, stream

KIND = "megatron"
_LATEST = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"


@dataclass(frozen=True, slots=True)
class _RankFile:
    name: str
    archive: TorchArchive
    tensors: list[PendingTensor]


def prepare(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job with what Megatron's files have a place for: the model, and the optimizer's state of it."""
    if not any(item.name.startswith(MODEL) for item in job.items):
        raise StateMismatch(
            f"{job.checkpoint.path}: no leaf is named {MODEL}*, so that there is no model to write"
        )
    parameters = {name for name in (*(item.name for item in job.items), *job.tied) if name.startswith(MODEL)}
    kept = [item for item in job.items if item.name.startswith((MODEL, OPTIMIZER))]
    tied = {name: of for name, of in job.tied.items() if name.startswith((MODEL, OPTIMIZER))}
    named = {name: state_name(name, parameters) for name in (*(item.name for item in kept), *tied)}
    items = tuple(replace(item, name=named[item.name]) for item in kept)
    return replace(job, items=items, tied={named[name]: named[of] for name, of in tied.items()}), ()


def plan(job: Job) -> list[OutputFile]:
    refuse_directory(job.path)
    latest = OutputFile(_LATEST, len(_latest(job)))
    return [latest, *(OutputFile(file.name, file.archive.nbytes) for file in _files(job, Ranks(job)))]


def write(job: Job) -> None:
    ranks = Ranks(job)
    files = _files(job, ranks)
    total = sum(file.archive.nbytes for file in files)
    with output_directory(job.path) as directory:
        inside = os.path.join(directory, _iteration(job))
        fs.mkdir(inside)
        done = 0
        for file in files:
            path = os.path.join(directory, file.name)
            fs.mkdir(os.path.dirname(path))
            reader = _Reader(job)
            fills = [reader.fill(tensor) for tensor in file.tensors]
            stream(path, file.archive, fills, _advance(job, done, total))
            fs.sync_dir(os.path.dirname(path))
            done += file.archive.nbytes
        fs.sync_dir(inside)
        with fs.write_file(os.path.join(directory, _LATEST), _latest(job)) as small:
            fs.sync([small])
        if job.verify:
            check(job, directory)


def check(job: Job, path: str) -> None:
    with ForeignCheckpoint(describe(path, KIND, Ranks(job).spec)) as written:
        compare_copies(written)
        compare_written(job, written)


def _advance(job: Job, done: int, total: int) -> Callable[[int], None]:
    return lambda nbytes: job.progress(min(done + nbytes, total), total)


def _iteration(job: Job) -> str:
    return f"iter_{job.checkpoint.step:07d}"


def _latest(job: Job) -> bytes:
    return f"{job.checkpoint.step}\n".encode()


def _files(job: Job, ranks: Ranks) -> list[_RankFile]:
    found: list[_RankFile] = []
    for tensor_rank in range(job.layout.tp):
        for stage in range(job.layout.pp):
            name = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if job.layout.pp > 1 else "")
            data, tensors = pickled(ranks.content(tensor_rank, stage))
            archive = TorchArchive(data, [tensor.nbytes for tensor in tensors])
            found.append(_RankFile(os.path.join(_iteration(job), name, _FILE), archive, tensors))
    return found


class _Reader:
    """The bytes of a rank's tensors, one tensor in memory at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._current: tuple[PendingTensor, Bytes] | None = None

    def fill(self, tensor: PendingTensor) -> Callable[[memoryview, int], None]:
        def fill(window: memoryview, offset: int) -> None:
            if self._current is None or self._current[0] is not tensor:
                self._current = None  # free before the next one is made
                self._current = tensor, self._made(tensor)
            window[:] = self._current[1][offset : offset + len(window)].data

        return fill

    def _made(self, tensor: PendingTensor) -> Bytes:
        item, plan = tensor.origin
        assert isinstance(item, Item)
        assert isinstance(plan, LocalPlan)
        size = itemsize(item.dtype)
        local: Bytes = np.zeros((*plan.shape, size), np.uint8)
        for move in plan.moves:
            shift = tuple(a - b for a, b in zip(move.local.start, move.source.start, strict=True))
            for box in _slabs(move.source, size):
                info = self._job.checkpoint._parts.leaf_infos[item.stored]
                data = cast(self._read(item, box), info.dtype, item.dtype)
                place = tuple(
                    slice(start + by, start + by + length)
                    for start, by, length in zip(box.start, shift, box.shape, strict=True)
                )
                local[place] = data.reshape((*box.shape, size))
        return local.reshape(-1)

    def _read(self, item: Item, box: Box) -> Bytes:
        nbytes = itemsize(self._job.checkpoint._parts.leaf_infos[item.stored].dtype) * box.volume
        buffer: Bytes = np.empty(nbytes, np.uint8)
        request = BoxRequest(item.stored, box, Memory(buffer.ctypes.data, nbytes, buffer))
        self._job.checkpoint._reader.fetch([request])
        return buffer


def _slabs(box: Box, size: int) -> list[Box]:
    """A box cut along its first dimension, so that about a window is read at once."""
    if not box.shape or not box.volume:
        return [box]
    rows = max(1, WINDOW_NBYTES // (size * math.prod(box.shape[1:])))
    return [
        Box((box.start[0] + first, *box.start[1:]), (min(rows, box.shape[0] - first), *box.shape[1:]))
        for first in range(0, box.shape[0], rows)
    ]
