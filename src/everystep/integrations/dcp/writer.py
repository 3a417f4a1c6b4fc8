"""DCP's ``StorageWriter``: the steps of `everystep.store.commit.driver`, with DCP's own messages.

For a checkpoint that is to appear at ``D``:

1. ``set_up_storage_writer``: the coordinator refuses a ``D`` that holds a checkpoint.
2. ``prepare_local_plan``: it makes ``D.partial``. ``prepare_global_plan``: it gives ranks their numbers. (Not
   both in the second: planners that keep plans have done so before it, and could not go on if it failed.)
3. ``write_data``: every rank writes what DCP's plan gives it into a shard of its own, all but the coordinator
   also the part that describes it, and syncs both. Size and digest of the part go to the coordinator with the
   results, and so do plain values.
4. ``finish``: the coordinator writes the root manifest, syncs, renames ``D.partial`` to ``D`` and syncs the
   directory above. **The rename is the commit.**

When DCP keeps its plans from save to save, ranks hear nothing new from the coordinator before they write: so
the directory is known by its name alone, and plans carry nothing but numbers that never change.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from everystep.engine import Memory
from everystep.engine.fs import OpenDirectory
from everystep.errors import Locked, RanksDisagree, SaveFailed, UnsupportedState
from everystep.format.geometry import Box, disjoint
from everystep.format.manifest import encode_root, part_ref
from everystep.format.records import PartRef
from everystep.integrations.dcp.dcp_save import DcpSave
from everystep.integrations.dcp.ignored_arguments import ignore_tuning
from everystep.integrations.dcp.paths import path_of, valid_path
from everystep.state import FragmentPlace, LeafSource, Node
from everystep.state.leaf_table import require_readable
from everystep.state.torch_arrays import describer, wrapper_refusal
from everystep.store.api import check_target
from everystep.store.commit.info import check_step
from everystep.store.commit.manifest import part_of, require_complete
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.shard_writer import ShardWriter
from everystep.store.commit.transaction import Transaction
from everystep.store.metrics import plain_metrics
from everystep.store.options import Options
from everystep.store.save_errors import saving
from everystep.universal.dcp.plain_values import NotPlain, value_of
from everystep.universal.dcp.record import DcpRecord, TensorFlags, compose, leaf_node

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
    from torch.futures import Future
else:
    StorageWriter = object  # registered as one below: torch is imported when a writer is made

_STEP = re.compile(r"step-([0-9]{12})")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank has written of an array, and what it takes that array to be."""

    dtype: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank tells the coordinator of an item; `part` of the part that its leaves are in."""

    kind: Literal["tensor", "bytes", "value"]
    value: Node = None
    piece: Piece | None = None
    part: PartRef | None = None


class Writer(StorageWriter):
    """Writes what ``torch.distributed.checkpoint`` saves as one Everystep checkpoint.

    When ``dcp.save`` returns, or the future of ``dcp.async_save`` is done, the checkpoint is durable and
    whole. Before that, and after a failure, the path holds what was there before.

    Args:
        path: The checkpoint. It may also be given to DCP, as ``checkpoint_id``.
        overwrite: Replace a checkpoint that is there, at once and whole.
        step: The step; by default the number in a name like ``step-000000000100``, else 0.
        metrics: Numbers to store beside the state.
        options: How to write.
        theirs: Arguments that tune DCP's ``FileSystemWriter`` (`thread_count`, `sync_files` ...). They mean
            nothing here, and are ignored with one warning.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        options: Options | None = None,
        **theirs: Any,
    ) -> None:
        _register()
        ignore_tuning(theirs)
        if step is not None:
            step = check_step(step)
        options = options or Options()
        if options.volumes or options.writers != "all":
            raise ValueError(
                "DCP's planner decides which rank writes what, and shards are in the checkpoint's directory. "
                "Options(volumes=..., writers=...) are for everystep.save and Checkpointer"
            )
        self._path = None if path is None else path_of(path)
        self._asked: dict[int, str] = {}
        """Where threads want to save to that have not begun yet."""
        self._overwrite = overwrite
        self._step = step
        self._metrics = plain_metrics(metrics)
        self._tuning = options.tuning()
        self._save_id = os.urandom(16).hex()
        self._has_begun = False
        self._coordinator = 0
        self._save: DcpSave | None = None
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]

    @property
    def checkpoint_id(self) -> str | None:
        """Where the next checkpoint is written."""
        return self._path

    @property
    def save_id(self) -> str:
        """Of the save that is under way, or the next one: the coordinator's becomes the checkpoint's id."""
        return self._save_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path that a checkpoint could be written to."""
        return valid_path(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        from torch.distributed.checkpoint.metadata import StorageMeta

        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another save begins, to `checkpoint_id` if that is given."""
        self._abort()
        self._renew()
        if checkpoint_id is not None:
            self._path = self._asked[threading.get_ident()] = path_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("an Everystep checkpoint is one commit of all ranks: leave use_collectives=True")
        self._abort()
        target = self._asked.pop(threading.get_ident(), self._path)
        if target is None:
            raise ValueError("no path: give one to Writer(path), or to DCP as checkpoint_id=")
        if is_coordinator:
            self._coordinator = int(kwargs.get("rank", 0))
            check_target(target, allow_other_files=True)
            Transaction(target, overwrite=self._overwrite).refuse_existing()
        if self._has_begun:  # DCP calls `reset` only if it is given a path
            self._renew()
        self._has_begun = True
        self._save = DcpSave(target, overwrite=self._overwrite, is_coordinator=is_coordinator)
        self._end = self._save.belongs_to(self)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        save = self._current()
        if save.is_coordinator:
            try:
                with saving(save.target):
                    step = _step_in(save.target) if self._step is None else self._step
                    save.make(step, self._metrics, self._tuning, self._save_id)
            except BaseException:
                save.abort()
                raise
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=self._number(rank)) for rank, plan in enumerate(plans)]

    def _number(self, rank: int) -> int:
        """Of a rank's files. The coordinator's is 0, whatever its rank: its part is in the root."""
        if rank == self._coordinator:
            return 0
        return rank + 1 if rank < self._coordinator else rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        from torch.futures import Future

        save = self._current()
        try:
            with saving(save.target), save.at_work():
                results = self._write(plan, planner, save)
        except BaseException:
            save.abort()
            raise
        if plan.storage_data != 0:
            save.close()  # what is left to do is the coordinator's
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner, save: DcpSave) -> list[WriteResult]:
        from torch.distributed.checkpoint.storage import WriteResult

        number: int = plan.storage_data
        if type(number) is not int:
            raise SaveFailed(
                "the planner returned a plan that it cached for another kind of storage writer. Planners "
                "with enable_plan_caching=True cache by class: derive a class for each kind of writer"
            )
        ref: PartRef | None = None
        with save.opened() as directory:
            leaves, told = _sources(plan.items, planner)
            with ShardWriter(number, [leaves], self._tuning) as writer:
                writer.start(directory, recycle=False)
                writer.wait(SaveObserver())
                part = part_of(number, writer.files(), writer.leaves())
                if number == 0:
                    writer.sync(directory)
                    save.part = part
                elif leaves:
                    ref = part_ref(part, writer.sync(directory, part))
        sizes = iter(leaves)
        return [
            WriteResult(
                item.index,
                0 if written.kind == "value" else next(sizes).nbytes,
                replace(written, part=ref),
            )
            for item, written in zip(plan.items, told, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._current()
        try:
            with saving(save.target), save.at_work():
                self._commit(save, metadata, results)
        except BaseException:
            save.abort()
            raise
        save.close()

    def _commit(self, save: DcpSave, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        transaction, commit, part = save.transaction, save.commit, save.part
        assert transaction is not None
        assert commit is not None
        assert part is not None
        from torch.distributed.checkpoint import filesystem

        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_meta = replace(self.storage_meta(), checkpoint_id=save.target)
        refs = {
            result.storage_data.part.rank: result.storage_data.part
            for written in results
            for result in written
            if result.storage_data.part is not None
        }
        for ref in refs.values():
            _require(transaction.directory, ref)
        others = [refs[number] for number in sorted(refs)]
        root = commit.root(_tree(metadata, results), part, others, world=len(results))
        commit.finish(encode_root(root), ())

    def _renew(self) -> None:
        self._save_id = os.urandom(16).hex()
        self._has_begun = False

    def _current(self) -> DcpSave:
        save = self._save
        if save is None or save.thread != threading.get_ident():
            raise SaveFailed(
                "this Writer has started another save, so this one was abandoned. Use one Writer for each of "
                "several saves at a time"
            )
        return save

    def _abort(self) -> None:
        """What a save that did not come to its end has left."""
        if self._save is not None and self._save.is_at_work:
            raise Locked(
                f"this Writer is saving to {self._save.target}: wait for that save, or use another Writer"
            )
        if self._end is not None:
            self._end()
        self._save = self._end = None

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which saves by itself (``AsyncCheckpointerType.PROCESS``)."""
        return {**vars(self), "_save": None, "_end": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _register()
        vars(self).update(state)


def _register() -> None:
    """So that ``isinstance(writer, StorageWriter)`` holds, though torch was not there for the class."""
    from torch.distributed.checkpoint.storage import StorageWriter as Protocol

    Protocol.register(Writer)


def _sources(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[LeafSource], list[Written]]:
    """The leaves to write for a plan, in the order of its items, and what to tell of each item."""
    from torch.distributed.checkpoint.planner import WriteItemType

    leaves: list[LeafSource] = []
    told: list[Written] = []
    counts: dict[str, int] = {}
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            try:
                told.append(Written("value", value_of(planner, item)))
            except NotPlain:
                leaves.append(_bytes_source(item, planner))
                told.append(Written("bytes"))
        else:
            index = counts[name] = counts.get(name, -1) + 1
            leaf, piece = _tensor_source(item, planner, index)
            leaves.append(leaf)
            told.append(Written("tensor", piece=piece))
    for leaf in leaves:
        require_readable(leaf)
    return leaves, told


def _bytes_source(item: WriteItem, planner: SavePlanner) -> LeafSource:
    made: Any = planner.resolve_data(item)
    data = np.frombuffer(made.getbuffer(), np.uint8)
    source = Memory(data.ctypes.data, data.nbytes, data)
    return LeafSource(item.index.fqn, "U8", data.shape, "numpy", source)


def _tensor_source(item: WriteItem, planner: SavePlanner, index: int) -> tuple[LeafSource, Piece]:
    import torch

    name = item.index.fqn
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    tensor: Any = planner.resolve_data(item)
    tensor = tensor.detach()
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # the result of a collective that the training has started
    if type(tensor) is not torch.Tensor:
        raise wrapper_refusal(tensor, name)
    dtype, shape, source = describer()(tensor, name)
    if shape != tuple(chunk.sizes):
        raise UnsupportedState(
            f"{name}: the planner announced a part of shape {list(chunk.sizes)} but gave {list(shape)}"
        )
    fragment = FragmentPlace(tuple(chunk.offsets), tuple(item.tensor_data.size), index)
    piece = Piece(dtype, fragment.whole, Box(fragment.start, shape))
    return LeafSource(name, dtype, shape, "torch", source, None, fragment), piece


def _require(directory: OpenDirectory, ref: PartRef) -> None:
    """Ranks that were given different paths would each have written, and none of it to the same place."""
    path = os.path.join(directory.path, ref.file)
    try:
        nbytes = os.stat(ref.file, dir_fd=directory.fileno(), follow_symlinks=False).st_size
    except FileNotFoundError:
        nbytes = -1
    if nbytes != ref.nbytes:
        raise SaveFailed(
            f"rank {ref.rank} reports that it wrote {path}, but "
            + ("it is not there" if nbytes < 0 else f"it has {nbytes} bytes and not {ref.nbytes}")
            + ". All ranks must save to the same path in a shared file system"
        )


def _tree(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Node:
    """The tree of all that was written. An error for an array that is not all there, or not one."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    written: dict[str, Written] = {}
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for rank, of_rank in enumerate(results):
        for result in of_rank:
            told: Written = result.storage_data
            written.setdefault(result.index.fqn, told)
            if told.piece is not None:
                pieces.setdefault(result.index.fqn, []).append((rank, told.piece))
    for name, some in pieces.items():
        _require_whole(name, some)
    described = metadata.state_dict_metadata
    # The planner's order is that of the state; that of the metadata depends on who writes what.
    paths = metadata.planner_data
    order = [name for name in paths if name in described] if isinstance(paths, dict) else []
    nodes: dict[str, Node] = {}
    properties: list[tuple[str, TensorFlags]] = []
    for name in dict.fromkeys((*order, *described)):
        what = described[name]
        if name not in written:
            raise SaveFailed(f"no rank wrote {name!r}, which is in the planner's metadata")
        if isinstance(what, TensorStorageMetadata):
            own = TensorFlags.of(what.properties)
            if own != TensorFlags():
                properties.append((name, own))
        nodes[name] = written[name].value if written[name].kind == "value" else leaf_node(name)
    record = DcpRecord(
        version=metadata.version,
        bytes=tuple(name for name in nodes if written[name].kind == "bytes"),
        properties=tuple(properties),
    )
    values = frozenset(name for name in nodes if written[name].kind == "value")
    tree = compose(nodes, record, values, metadata.planner_data)
    require_complete([tree], {name for name in written if written[name].kind != "value"})
    return tree


def _require_whole(name: str, pieces: Sequence[tuple[int, Piece]]) -> None:
    """That what ranks have written of an array is all of it, once, and of one type and shape."""
    first_rank, first = pieces[0]
    for rank, piece in pieces:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise RanksDisagree(
                f"rank {first_rank} saves a part of {first.dtype}{list(first.shape)}, but "
                f"rank {rank} a part of {piece.dtype}{list(piece.shape)}",
                leaf=name,
                ranks=(first_rank, rank),
            )
    boxes = [piece.box for _, piece in pieces]
    held, whole = sum(box.volume for box in boxes), math.prod(first.shape)
    if held != whole or (len(boxes) > 1 and not disjoint(boxes)):
        raise UnsupportedState(
            f"{name}: the ranks save {held} of its {whole} elements"
            + (", some of them twice" if held >= whole else "")
            + ". An Everystep checkpoint holds whole arrays: save together on all ranks that hold a part"
        )


def _step_in(target: str) -> int:
    match = _STEP.fullmatch(os.path.basename(target))
    return int(match[1]) if match else 0
