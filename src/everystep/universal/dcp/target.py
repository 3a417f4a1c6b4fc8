"""Directories of `torch.distributed.checkpoint`, which its ``FileSystemReader`` reads: ``dcp.load``.

Names are those that DCP's planner gives to the state: the path in it, joined with dots. A model's weight is
``model.<name>``; an optimizer's state is ``optimizer.state.<parameter>.<state>``, beside
``optimizer.param_groups.<number>.<option>``, as torch's ``get_state_dict`` has it.

Readers take an item whole, even if they want a part of it. So large leaves are cut into pieces, along their
first dimensions. A tied leaf is stored once, and has two names in the metadata.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from everystep.engine.atomic_file import synced_file
from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box, whole
from everystep.state import Node, leaf_names
from everystep.state.node import NAMESPACE, items_of, localized, pairs_of, tag_of
from everystep.state.torch_arrays import load_torch, torch_dtype
from everystep.store.stream.leaf_stream import LeafStream, StreamedLeaf
from everystep.universal.atomic_output import output_directory, refuse_directory
from everystep.universal.dcp.plain_values import ValuePickler
from everystep.universal.dcp.record import DcpEntries, entries_of
from everystep.universal.items import Item, Job, OutputFile, progress_of
from everystep.universal.readback import compare_arrays
from everystep.universal.torch_file.pickle_writer import PendingTensor, pickled
from everystep.universal.torch_file.zip_writer import TorchArchive, write_archive

_SHOWN = 5
_PIECE_NBYTES = 64 << 20
_READ_NBYTES = 256 << 20
_ITEM_NBYTES = 1024  # what an archive of one tensor takes beside it, at most
_COPY_NBYTES = 4 << 20
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class _ItemBox:
    """A box of an item's leaf, whose elements follow each other there from byte `start` on."""

    number: int
    box: Box
    start: int
    nbytes: int


def prepare(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job, and a note of what DCP leaves out. `UnsupportedState` for a state that DCP could not load."""
    tree = localized(job.tree, job.local)
    if pairs_of(tree) is None:
        raise UnsupportedState(
            "DCP saves dicts, and this state is none: put it into one, or convert to everystep"
        )
    left_out: list[str] = []
    for key, node in pairs_of(tree) or ():
        if not _is_saved(node, str(key), left_out):
            left_out.append(str(key))
    if not left_out:
        return job, ()
    shown = ", ".join(left_out[:_SHOWN]) + (
        f" and {len(left_out) - _SHOWN} more" if left_out[_SHOWN:] else ""
    )
    return job, (f"DCP saves nothing of empty dicts: {shown}",)


def _is_saved(node: Node, place: str, left_out: list[str]) -> bool:
    """Whether DCP saves anything of a node. Adds the dicts in it that DCP leaves out to `left_out`."""
    items = items_of(node)
    if items is not None:
        for number, item in enumerate(items):
            if not _is_saved(item, f"{place}.{number}", left_out):
                raise UnsupportedState(
                    f"{place}.{number}: DCP saves nothing of an empty dict, and cannot load the list "
                    "that it is in. Select other leaves, or convert to everystep"
                )
        return True
    pairs = None if tag_of(node) == NAMESPACE else pairs_of(node)
    if pairs is None:
        return True
    empty = [str(key) for key, item in pairs if not _is_saved(item, f"{place}.{key}", left_out)]
    if len(empty) == sum(1 for _ in pairs_of(node) or ()):
        return False
    left_out += [f"{place}.{key}" for key in empty]
    return True


def plan(job: Job) -> list[OutputFile]:
    refuse_directory(job.path)
    entries = _entries(job)
    values = sum(len(data) for _, data in _values(job, entries))
    sizes = [sum(piece.nbytes + _ITEM_NBYTES for piece in group) for group in _groups(job)]
    sizes[-1] += values
    return [OutputFile(_file_name(number), nbytes) for number, nbytes in enumerate(sizes)]


def write(job: Job) -> None:
    with output_directory(job.path) as directory:
        _DirectoryWriter(job, directory).write()
        if job.verify:
            check(job, directory)


def check(job: Job, path: str) -> None:
    """Reads the result with torch's own reader, and compares."""
    entries = _entries(job)
    names = _tensor_names(job, entries)
    for group in _read_groups(job):
        wanted = [item for item in group if names.get(item.name)]
        arrays = _load(path, {names[item.name][0]: item for item in wanted})
        compare_arrays(job, arrays, wanted)
    found = _load_bytes(path, [*entries.values, *entries.bytes])
    for name, data in (*_values(job, entries), *_stored_bytes(job, entries)):
        if found.get(name) != data:
            raise CorruptCheckpoint("it differs from its source", path=path, leaf=name)


def _entries(job: Job) -> DcpEntries:
    return entries_of(localized(job.tree, job.local), job.checkpoint.path, pruned=True)


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


def _tensor_names(job: Job, entries: DcpEntries) -> dict[str, list[str]]:
    """For every item its names in DCP: more than one if it is tied."""
    found: dict[str, list[str]] = {}
    for name in entries.names:
        if name not in entries.values and name not in entries.bytes:
            leaf = entries.leaves.get(name, name)
            found.setdefault(job.tied.get(leaf, leaf), []).append(name)
    return found


def _values(job: Job, entries: DcpEntries) -> Iterator[tuple[str, bytes]]:
    """What is not a tensor, by name, as DCP's planner pickles it."""
    pickler = ValuePickler()
    for name, node in entries.values.items():
        yield name, pickler.bytes_of(node, _bytes_held(job, node).__getitem__).getvalue()


def _bytes_held(job: Job, node: Node) -> Mapping[str, Any]:
    """The large ``bytes`` of a value, which are leaves in our format."""
    names = list(leaf_names(node))
    return job.checkpoint.read(names) if names else {}


def _stored_bytes(job: Job, entries: DcpEntries) -> Iterator[tuple[str, bytes]]:
    """Objects that DCP pickled and Everystep stored as bytes (`everystep.integrations.dcp`)."""
    for name in sorted(entries.bytes):
        yield name, bytes(job.checkpoint.read([name])[name])


def _pieces(job: Job, stored_bytes: frozenset[str]) -> Iterator[_ItemBox]:
    largest = min(_PIECE_NBYTES, job.max_shard_nbytes)
    for number, item in enumerate(job.items):
        if item.name not in stored_bytes:
            size = itemsize(item.dtype)
            start = 0
            for box in _boxes(item.shape, max(1, largest // size)):
                nbytes = size * box.volume
                yield _ItemBox(number, box, start, nbytes)
                start += nbytes


def _boxes(shape: tuple[int, ...], largest: int) -> Iterator[Box]:
    """Boxes of at most so many elements, one after another in C order.

    >>> [(box.start, box.shape) for box in _boxes((3, 4), 8)]
    [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if math.prod(shape) <= largest:
        yield whole(shape)
        return
    inner = math.prod(shape[1:])
    if inner > largest:
        for row in range(shape[0]):
            for box in _boxes(shape[1:], largest):
                yield Box((row, *box.start), (1, *box.shape))
        return
    rows = largest // inner
    rest = (0,) * (len(shape) - 1)
    for row in range(0, shape[0], rows):
        yield Box((row, *rest), (min(rows, shape[0] - row), *shape[1:]))


def _groups(job: Job) -> list[list[_ItemBox]]:
    """The pieces of each file."""
    groups: list[list[_ItemBox]] = [[]]
    room = job.max_shard_nbytes
    for piece in _pieces(job, _entries(job).bytes):
        nbytes = piece.nbytes + _ITEM_NBYTES
        if groups[-1] and nbytes > room:
            groups.append([])
            room = job.max_shard_nbytes
        groups[-1].append(piece)
        room -= nbytes
    return groups


class _DirectoryWriter:
    """One conversion: data files, then the metadata, each synced."""

    def __init__(self, job: Job, directory: str) -> None:
        self._job = job
        self._directory = directory
        self._entries = _entries(job)
        self._names = _tensor_names(job, self._entries)
        self._boxes: dict[str, list[Box]] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        """The file, offset and length of each item."""
        self._advance = progress_of(job)

    def write(self) -> None:
        groups = _groups(self._job)
        leaves = [StreamedLeaf(item.stored, item.dtype) for item in self._job.items]
        with LeafStream(self._job.checkpoint, leaves) as stream:
            for number, group in enumerate(groups):
                name = _file_name(number)
                with synced_file(os.path.join(self._directory, name)) as file:
                    for piece in group:
                        self._write_piece(file, name, piece, stream)
                    if number == len(groups) - 1:
                        self._write_values(file, name, stream)
        self._write_metadata()

    def _write_piece(self, file: BinaryIO, name: str, piece: _ItemBox, stream: LeafStream) -> None:
        item = self._job.items[piece.number]
        torch_dtype(item.dtype)  # fails for a type that torch lacks
        data, _ = pickled(PendingTensor(item.dtype, piece.box.shape))
        archive = TorchArchive(data, [piece.nbytes])
        offset = file.tell()
        write_archive(file, archive, [functools.partial(_fill, stream, piece)])
        self._advance(piece.nbytes)
        self._boxes.setdefault(item.name, []).append(piece.box)
        self._places[item.name, piece.box.start] = (name, offset, archive.nbytes)

    def _write_values(self, file: BinaryIO, name: str, stream: LeafStream) -> None:
        for entry, data in _values(self._job, self._entries):
            self._places[entry, None] = (name, file.tell(), len(data))
            file.write(data)
        for number, item in enumerate(self._job.items):
            if item.name in self._entries.bytes:
                self._places[item.name, None] = (name, file.tell(), item.nbytes)
                for start in range(0, item.nbytes, _COPY_NBYTES):
                    block = memoryview(bytearray(min(_COPY_NBYTES, item.nbytes - start)))
                    stream.fill(number, block, start)
                    file.write(block)
                    self._advance(len(block))

    def _write_metadata(self) -> None:
        with synced_file(os.path.join(self._directory, _METADATA)) as file:
            pickle.dump(self._metadata(), file)

    def _metadata(self) -> Any:
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        size = load_torch().Size
        known: dict[str, Any] = {}
        storage: dict[Any, Any] = {}
        for item in self._job.items:
            for name in self._names.get(item.name, ()):
                boxes = self._boxes[item.name]
                known[name] = TensorStorageMetadata(
                    TensorProperties(dtype=torch_dtype(item.dtype)),
                    size(item.shape),
                    [ChunkStorageMetadata(size(box.start), size(box.shape)) for box in boxes],
                )
                for number, box in enumerate(boxes):
                    place = self._places[item.name, box.start]
                    index = MetadataIndex(name, box.start, number)
                    storage[index] = _StorageInfo(*place)
        for name in (*self._entries.values, *sorted(self._entries.bytes)):
            place = self._places[name, None]
            known[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = _StorageInfo(*place)
        ordered = {name: known[name] for name in self._entries.names if name in known}
        paths = self._entries.planner_data
        if isinstance(paths, dict):
            paths = {name: path for name, path in paths.items() if name in known}
        return Metadata(
            ordered,
            paths,
            storage,
            storage_meta=StorageMeta(save_id=self._job.checkpoint.id),
            version=CURRENT_DCP_VERSION,
        )


def _fill(stream: LeafStream, piece: _ItemBox, block: memoryview, offset: int) -> None:
    stream.fill(piece.number, block, piece.start + offset)


# --- reading back


def _read_groups(job: Job) -> Iterator[list[Item]]:
    """Items that are read at a time: the reader reads the metadata once for each group."""
    group: list[Item] = []
    nbytes = 0
    for item in job.items:
        if group and nbytes + item.nbytes > _READ_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(item)
        nbytes += item.nbytes
    if group:
        yield group


def _load(path: str, items: Mapping[str, Item]) -> dict[str, Any]:
    """Tensors by the names of their items, given these by their names in DCP."""
    torch = load_torch()
    state = {
        name: torch.empty(item.shape, dtype=torch_dtype(item.dtype), device="cpu")
        for name, item in items.items()
    }
    _load_state(path, state, None)
    return {item.name: state[name] for name, item in items.items()}


def _load_bytes(path: str, names: list[str]) -> dict[str, bytes]:
    """The bytes of entries that are no tensors, as torch's reader gives them to a planner."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    found: dict[str, bytes] = {}

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            found[read_item.dest_index.fqn] = value.getvalue()

    state: dict[str, Any] = dict.fromkeys(names, 0)
    _load_state(path, state, Planner())
    return found


def _load_state(path: str, state: dict[str, Any], planner: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group, which is not needed
            load(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:
        why = next(iter(error.failures.values()))[0]
        raise CorruptCheckpoint(f"torch cannot read what was written: {why}", path=path) from error
