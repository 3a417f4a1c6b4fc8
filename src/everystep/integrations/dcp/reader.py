"""DCP's ``StorageReader``: reads what the planner wants from the shards that hold it, verified.

Tensors are filled in place. If that is impossible (another element type, memory that torch has to copy to, or
memory that two names share), a part is read into a buffer and torch copies it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import local
from typing import TYPE_CHECKING, Any

from everystep.engine import Memory, Strided
from everystep.errors import CheckpointNotFound, CorruptCheckpoint, IncompleteCheckpoint, ReadFailed
from everystep.format.geometry import Box, whole
from everystep.integrations.dcp.ignored_arguments import refuse_extensions
from everystep.integrations.dcp.paths import path_of, valid_path
from everystep.state import LeafMeta, empty, leaf_names
from everystep.state.torch_arrays import destination, torch_dtype
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint
from everystep.store.read.requests import BoxRequest
from everystep.universal.dcp.plain_values import ValuePickler
from everystep.universal.dcp.record import DcpEntries, TensorFlags, entries_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.futures import Future
else:
    StorageReader = object  # registered as one below: torch is imported when a reader is made

_BESIDE_NBYTES = 64 << 20
"""So much is read beside at a time; more only for a single part that is larger."""


@dataclass(frozen=True, slots=True)
class _Fill:
    """A tensor of the planner's, and the part of a leaf that belongs there."""

    item: ReadItem
    tensor: Any
    meta: LeafMeta
    box: Box
    where: Any
    """Where to read it to; None when torch has to copy it."""


class _Here(local):
    """What a thread loads. It goes with the thread: DCP does not tell a reader that a load has failed."""

    asked: str | None = None
    opened: tuple[Checkpoint, DcpEntries] | None = None
    failed: Exception | None = None

    def __reduce__(self) -> tuple[type[_Here], tuple[()]]:
        return _Here, ()  # another process begins with nothing


class Reader(StorageReader):
    """Reads an Everystep checkpoint for ``torch.distributed.checkpoint``, whatever layout it was saved in.

    If a byte does not match its checksum, `CorruptCheckpoint`, inside DCP's ``CheckpointException``, names
    file and leaf. Checkpoints that DCP has not written are read as well, under the names that DCP would give.

    Args:
        path: The checkpoint. It may also be given to DCP, as ``checkpoint_id``.
        verify: Compare every byte with its checksum.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        verify: bool = True,
        _extension_registry: None = None,
    ) -> None:
        refuse_extensions(_extension_registry, "_extension_registry", "Reader")
        from torch.distributed.checkpoint.storage import StorageReader as Protocol

        Protocol.register(Reader)
        self._path = None if path is None else path_of(path)
        self._verify = verify
        self._load_id = os.urandom(16).hex()
        self._here = _Here()  # DCP makes all calls of one load in one thread, and several may load at a time

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that is read."""
        return self._path

    @property
    def load_id(self) -> str:
        """Of the load that is under way, or the next one; `reset` makes another."""
        return self._load_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path that a checkpoint could be read from."""
        return valid_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another load begins, from `checkpoint_id` if that is given."""
        self._close()
        self._load_id = os.urandom(16).hex()
        if checkpoint_id is not None:
            self._path = self._here.asked = path_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        from torch.distributed.checkpoint.metadata import Metadata

        here = self._here
        if "rank" in kwargs and here.failed is not None:
            # DCP asks again after a failure, and would tell of the second one as text only. It is raised by
            # `set_up_storage_reader` instead, as what it is.
            return Metadata({})
        self._close()
        path, here.asked = here.asked or self._path, None
        if path is None:
            raise ValueError("no path: give one to Reader(path), or to DCP as checkpoint_id=")
        try:
            checkpoint = _open(path)
            entries = entries_of(checkpoint._parts.tree, checkpoint._parts.manifest_path)
            _check_bytes(checkpoint, entries)
            here.opened = checkpoint, entries
            return _metadata(checkpoint, entries, self._load_id)
        except Exception as error:
            here.failed = error
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        failed, self._here.failed = self._here.failed, None
        if failed is not None:
            raise failed

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        opened = self._here.opened
        if opened is None:
            raise self._another()
        return replace(plan, storage_data=opened[0].id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            # One that is replaced right now, or a directory that ranks do not share.
            raise CorruptCheckpoint("ranks opened different checkpoints at this path", path=self._path)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from torch.futures import Future

        if self._here.opened is None:
            self.read_metadata()
        assert self._here.opened is not None
        checkpoint, entries = self._here.opened
        try:
            if plan.storage_data not in (None, checkpoint.id):
                raise self._another()
            _Load(checkpoint, entries, planner, verify=self._verify).run(plan.items)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _another(self) -> ReadFailed:
        return ReadFailed(
            f"this Reader has started another load, from {self._path}, during this one: use one Reader for "
            "each"
        )

    def _close(self) -> None:
        here = self._here
        opened, here.opened, here.failed = here.opened, None, None
        if opened is not None:
            opened[0].close()


def _open(path: str) -> Checkpoint:
    try:
        return open_checkpoint(path)
    except IncompleteCheckpoint:
        if not os.path.exists(os.path.join(path, ".metadata")):
            raise
        raise CheckpointNotFound(
            f"{path} holds a checkpoint of DCP's own FileSystemWriter: read it with FileSystemReader"
        ) from None


def _check_bytes(checkpoint: Checkpoint, entries: DcpEntries) -> None:
    """Memory for them is of this type and shape: what is not must not be read to it."""
    metas = checkpoint._parts.metas
    for name in entries.bytes:
        meta = metas.get(name)
        if meta is None or meta.dtype != "U8" or len(meta.shape) != 1:
            raise CorruptCheckpoint(
                "not the bytes of an object", path=checkpoint._parts.manifest_path, leaf=name
            )


def _metadata(checkpoint: Checkpoint, entries: DcpEntries, load_id: str) -> Metadata:
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        StorageMeta,
        TensorStorageMetadata,
    )

    properties = dict(entries.record.properties)
    chunks = _chunks(checkpoint)
    known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    metas = checkpoint._parts.metas
    for name in entries.names:
        if name in entries.values or name in entries.bytes:
            known[name] = BytesStorageMetadata()
            continue
        leaf = entries.leaves.get(name, name)
        of = checkpoint.aliases.get(leaf, leaf)
        known[name] = TensorStorageMetadata(
            _properties(metas[of], properties.get(name, TensorFlags())),
            _size(metas[of].shape),
            list(chunks.get(of, [])),
        )
    return Metadata(
        known,
        entries.planner_data,
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=checkpoint.path, save_id=checkpoint.id, load_id=load_id),
        version=entries.record.version,
    )


def _chunks(checkpoint: Checkpoint) -> dict[str, list[ChunkStorageMetadata]]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    found: dict[str, list[ChunkStorageMetadata]] = {}
    for part in checkpoint._parts:
        for leaf in part.leaves:
            found.setdefault(leaf.name, []).extend(
                ChunkStorageMetadata(_size(fragment.start), _size(fragment.shape))
                for fragment in leaf.fragments
            )
    return found


def _size(numbers: Sequence[int]) -> Any:
    import torch

    return torch.Size(numbers)


def _properties(meta: LeafMeta, own: TensorFlags) -> TensorProperties:
    import torch
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorProperties(
        dtype=torch_dtype(meta.dtype),
        requires_grad=own.requires_grad,
        memory_format=getattr(torch, own.memory_format),
        pin_memory=own.pin_memory,
    )


class _Load:
    """One rank's share of a load."""

    def __init__(
        self, checkpoint: Checkpoint, entries: DcpEntries, planner: LoadPlanner, *, verify: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._entries = entries
        self._planner = planner
        self._verify = verify
        self._metas = checkpoint._parts.metas

    def run(self, items: Sequence[ReadItem]) -> None:
        from torch.distributed.checkpoint.planner import LoadItemType

        objects = [item for item in items if item.type == LoadItemType.BYTE_IO]
        fills = [self._fill(item) for item in items if item.type != LoadItemType.BYTE_IO]
        fills = _without_sharing(fills)
        stored, wanted = self._stored_bytes(objects)
        direct = [fill for fill in fills if fill.where is not None]
        wanted += [BoxRequest(fill.meta.name, fill.box, fill.where) for fill in direct]
        self._checkpoint._reader.fetch(wanted, verify=self._verify)
        self._commit(direct)
        self._read_beside([fill for fill in fills if fill.where is None])
        pickler = ValuePickler()
        for item in objects:
            name = item.storage_index.fqn
            data = stored.get(name)
            value = io.BytesIO(data) if data is not None else self._pickled(pickler, name)
            self._planner.load_bytes(item, value)

    def _pickled(self, pickler: ValuePickler, name: str) -> io.BytesIO:
        node = self._entries.values[name]
        arrays, wanted = self._checkpoint._reader.fresh(leaf_names(node), "numpy")
        self._checkpoint._reader.fetch(wanted, verify=self._verify)
        return pickler.bytes_of(node, arrays.__getitem__)

    def _fill(self, item: ReadItem) -> _Fill:
        meta = self._meta(item.storage_index.fqn)
        tensor = self._planner.resolve_tensor(item).detach()
        offset = item.storage_index.offset or (0,) * len(meta.shape)
        start = tuple(at + more for at, more in zip(offset, item.storage_offsets, strict=True))
        box = Box(start, tuple(item.lengths))
        if tuple(tensor.shape) != box.shape:
            raise ValueError(
                f"{item.storage_index.fqn}: the planner asks for a part of shape {list(box.shape)}, and its "
                f"tensor has {list(tensor.shape)}"
            )
        same = tensor.dtype == torch_dtype(meta.dtype)
        return _Fill(item, tensor, meta, box, destination(tensor) if same else None)

    def _meta(self, name: str) -> LeafMeta:
        leaf = self._entries.leaves.get(name, name)
        found = self._metas.get(self._checkpoint.aliases.get(leaf, leaf))
        if found is None:
            raise CorruptCheckpoint("no such leaf", path=self._checkpoint.path, leaf=name)
        return found

    def _stored_bytes(self, objects: Sequence[ReadItem]) -> tuple[dict[str, Any], list[BoxRequest]]:
        """Memory for objects that are stored as bytes, and what to fetch to fill it."""
        found: dict[str, Any] = {}
        wanted: list[BoxRequest] = []
        for item in objects:
            name = item.storage_index.fqn
            if name not in self._entries.values and name not in found:
                meta = self._meta(name)
                found[name], memory = empty("U8", meta.shape, "numpy", 0)
                wanted.append(BoxRequest(meta.name, whole(meta.shape), memory))
        return found, wanted

    def _read_beside(self, fills: Sequence[_Fill]) -> None:
        for group in _groups(fills):
            arrays: list[Any] = []
            wanted: list[BoxRequest] = []
            for fill in group:
                array, memory = empty(fill.meta.dtype, fill.box.shape, "torch", 0)
                arrays.append(array)
                wanted.append(BoxRequest(fill.meta.name, fill.box, memory))
            self._checkpoint._reader.fetch(wanted, verify=self._verify)
            for fill, array in zip(group, arrays, strict=True):
                fill.tensor.copy_(array)
            self._commit(group)

    def _commit(self, fills: Sequence[_Fill]) -> None:
        from torch.autograd.graph import increment_version

        for fill in fills:
            if fill.where is not None and not fill.tensor.is_inference():
                increment_version(fill.tensor)  # the engine writes behind torch's back
            self._planner.commit_tensor(fill.item, fill.tensor)


def _groups(fills: Sequence[_Fill]) -> Iterator[list[_Fill]]:
    group: list[_Fill] = []
    nbytes = 0
    for fill in fills:
        size = fill.box.volume * torch_dtype(fill.meta.dtype).itemsize
        if group and nbytes + size > _BESIDE_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(fill)
        nbytes += size
    if group:
        yield group


def _without_sharing(fills: Sequence[_Fill]) -> list[_Fill]:
    """Of tensors that share memory under different names, all but the first are copied to by torch.

    The engine would fill and check them at the same time, and what is stored of them need not be the same.
    """
    spans: dict[str, tuple[int, int]] = {}
    for fill in fills:
        span = _span(fill.where)
        if span is not None:
            name = fill.item.dest_index.fqn
            before = spans.get(name, span)
            spans[name] = min(before[0], span[0]), max(before[1], span[1])
    shared: set[str] = set()
    end = 0
    for name, (begin, stop) in sorted(spans.items(), key=lambda entry: entry[1]):
        if begin < end:
            shared.add(name)
        end = max(end, stop)
    return [
        _Fill(fill.item, fill.tensor, fill.meta, fill.box, None)
        if fill.item.dest_index.fqn in shared
        else fill
        for fill in fills
    ]


def _span(where: object) -> tuple[int, int] | None:
    """The addresses between which host memory lies; None for other memory, and for none at all."""
    if isinstance(where, Memory) and where.nbytes:
        return where.address, where.address + where.nbytes
    if isinstance(where, Strided) and where.nbytes:
        reach = [(size - 1) * step for size, step in zip(where.shape, where.strides, strict=True)]
        low = where.address + sum(step for step in reach if step < 0)
        return low, where.address + sum(step for step in reach if step > 0) + where.itemsize
    return None
