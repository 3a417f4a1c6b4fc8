"""A committed checkpoint as this library sees it: what it holds, and its bytes on demand.

Opening reads and validates the manifest only. Every later read is verified against its checksums by default.
An open checkpoint is locked: retention may remove it, but no writer overwrites its files.

However many ranks wrote it, it is one state here: leaves are whole arrays, and elements of a leaf come from
all files that hold some.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from msgspec import structs

from holdfast.engine import ALIGNMENT, READING, Memory, Tuning
from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    LeafNotFound,
    ReadFailed,
    StateMismatch,
    UnsupportedState,
)
from holdfast.format.dtypes import itemsize
from holdfast.format.geometry import whole
from holdfast.format.records import EMBEDDED, Leaf, Part, Root
from holdfast.state import (
    Framework,
    FreshArrays,
    LeafMeta,
    Node,
    Restore,
    check_framework,
    empty,
    prune,
    unflatten,
    values,
)
from holdfast.state.node import localized
from holdfast.store.names import MANIFEST, SHARD, is_step_name, step_name
from holdfast.store.os_errors import shows_damage
from holdfast.store.read.file_access import FileAccess
from holdfast.store.read.foreign import open_foreign
from holdfast.store.read.gather import FileReads, fetch, plan_fetch
from holdfast.store.read.lazy_leaf import LazyLeaf
from holdfast.store.read.open import newest, open_checkpoint
from holdfast.store.read.parts import Parts, local_rank
from holdfast.store.read.requests import BoxRequest, box_requests
from holdfast.store.read.restore_warnings import Unrestored
from holdfast.store.read.shard_reader import Problem, ShardReader, whole_leaf

_BATCH_NBYTES = 256 << 20
"""Host memory that tensors pass through on their way to a device. A larger tensor takes its own size."""


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A leaf as stored. `alias_of`: the leaf it shares its bytes with."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    framework: Framework
    alias_of: str | None = None


class StoredCheckpoint:
    """One committed checkpoint, with all that the layers of this library need of it.

    `holdfast.store.checkpoint.Checkpoint` is the part of it that users see.
    """

    def __init__(self, path: str, tuning: Tuning = READING) -> None:
        hold, root = open_checkpoint(path)
        embedded = any(file.header_xxh3 == EMBEDDED for file in root.part.files)
        self._begin(hold, root, os.path.join(path, SHARD if embedded else MANIFEST), tuning)

    def _begin(self, hold: FileAccess, root: Root, manifest_path: str, tuning: Tuning) -> None:
        """From records that have been checked, to files that `hold` gives access to."""
        self.path = hold.path
        self._hold = hold
        self.root = root
        self.manifest_path = manifest_path
        self._tuning = tuning
        self.parts = Parts(root, hold, manifest_path)

    @property
    def step(self) -> int:
        return self.root.step

    @property
    def id(self) -> str:
        return self.root.id

    @property
    def created(self) -> float:
        """Unix time of the save."""
        return self.root.created

    @property
    def world(self) -> int:
        """How many ranks took part in the save."""
        return self.root.world

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.root.metrics)

    @property
    def facts(self) -> Mapping[str, str]:
        """Of a foreign checkpoint: what else is known of it, to be shown. None of one of ours."""
        return {}

    @property
    def tree(self) -> Node:
        """The state with its arrays taken out, of all ranks together."""
        return self.parts.tree

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of leaves, and the leaf that each means."""
        return self.parts.aliases

    @property
    def metas(self) -> dict[str, LeafMeta]:
        """Every stored leaf but those that belong to one rank alone."""
        return dict(self.parts.metas)

    def part(self, rank: int) -> Part:
        """What a rank wrote; `KeyError` when it wrote nothing."""
        return self.parts[rank]

    def local(self, rank: int) -> dict[str, Node]:
        """The trees of what belongs to one rank alone, by place; none when there was no such rank."""
        return dict(self.parts[rank].local) if rank in self.parts else {}

    def metas_for(self, rank: int) -> dict[str, LeafMeta]:
        """The leaves that a rank can restore: those of all, and its own."""
        own = self.parts.local_metas(rank)
        return {**self.parts.metas, **own} if own else self.parts.metas

    @functools.cached_property
    def leaves(self) -> dict[str, LeafInfo]:
        """Every leaf by name, tied ones and those of single ranks included."""
        metas, aliases = dict(self.parts.metas), dict(self.parts.aliases)
        for rank in self.parts.ranks:
            metas.update(self.parts.local_metas(rank))
            aliases.update(self.parts.local_aliases(rank))
        found = {name: _info(meta, None) for name, meta in metas.items()}
        found.update({name: _info(metas[of], of) for name, of in aliases.items()})
        return found

    @functools.cached_property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name; where every rank has its own, that of rank 0."""
        return values(self.tree, local=self.local(0), where=self.manifest_path)

    @property
    def nbytes(self) -> int:
        """The size of the arrays that one process loads; where every rank has its own, those of rank 0."""
        return sum(_info(meta, None).nbytes for meta in self.metas_for(0).values())

    @property
    def stored_nbytes(self) -> int:
        return sum(file.nbytes for part in self.parts for file in part.files)

    def __getitem__(self, name: str) -> LazyLeaf:
        """A leaf by name; index it to read only that part: ``ck["model.w"][10:20]``."""
        return LazyLeaf(name, self._meta(name), self.fetch)

    def __contains__(self, name: object) -> bool:
        if name in self.parts.metas or name in self.parts.aliases:
            return True
        return isinstance(name, str) and local_rank(name) is not None and name in self.leaves

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def read(
        self,
        select: str | Iterable[str] = "*",
        *,
        framework: Framework | None = None,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """The leaves whose names match a glob (or any of several), as arrays in memory."""
        chosen = self.select(select)
        return self._read_fresh(chosen, framework, verify=verify, progress=progress)

    def select(self, patterns: str | Iterable[str]) -> list[str]:
        """Names of the leaves that match. A pattern that matches nothing is an error: a typing mistake.

        A leaf whose name has brackets or stars is matched by that name, whatever it means as a pattern.
        What belongs to single ranks is matched by ``*``, and by patterns that begin with their ``@``.
        """
        chosen: dict[str, None] = {}
        for pattern in _patterns(patterns):
            # All leaves are in all parts, which none of many ranks should have to open.
            alone = pattern == "*" or pattern.startswith("@")
            names = self.leaves if alone else [*self.parts.metas, *self.parts.aliases]
            matching = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
            if not matching and pattern != "*":
                text = f"no leaf of {self.path} matches {pattern!r}; `holdfast show` lists them"
                if self.world > 1 and not alone:
                    text += f". Names of what belongs to single ranks begin with @: try '@*.{pattern}'"
                raise StateMismatch(text, missing=[pattern])
            chosen.update(dict.fromkeys(matching))
        return list(chosen)

    def load(
        self,
        into: object = None,
        *,
        select: str | Iterable[str] | None = None,
        framework: Framework | None = None,
        device: Any = None,
        verify: bool = True,
        strict: bool = True,
    ) -> Any:
        """The whole tree in fresh memory, or put back in place with `into`. See `holdfast.load`."""
        if into is None:
            tree = localized(self.tree, self.local(0))
            if select is None:
                chosen = self.parts.names_for(0)
            else:
                chosen = self.select(select)
                tree = prune(tree, set(chosen))
            if device is None:
                arrays = self._read_fresh(chosen, framework, verify=verify)
            else:
                arrays = self._read_to_device(chosen, framework, device, verify=verify)
            return unflatten(tree, arrays, where=self.manifest_path)
        refuse_fresh(framework, device)
        return self._restore(into, select, verify=verify, strict=strict)

    def plan_restore(
        self, into: object, select: str | Iterable[str] | None = None, *, rank: int = 0, strict: bool = True
    ) -> Restore:
        """How the state `into` of a rank is filled. With `strict`, `StateMismatch` unless all of it fits.

        Read `box_requests` it and `fresh` arrays for what it wants fresh, and hand these to its `finish`.
        """
        only = None if select is None else set(self.select(select))
        aliases = {**self.aliases, **self.parts.local_aliases(rank)}
        local = self.local(rank)
        metas = self.metas_for(rank)
        restore = Restore(into, self.tree, metas, aliases, only, local=local, alike=self.alike)
        if restore.mismatch and strict:
            raise restore.mismatch.error(self.path)
        if restore.lacks and not restore.fills:
            raise restore.mismatch.nothing(self.path)
        return restore

    def alike(self, one: str, other: str) -> bool:
        """Whether two leaves have the same bytes: by their checksums, if they are stored in like pieces."""
        metas = self._meta(one), self._meta(other)
        if (metas[0].dtype, metas[0].shape) != (metas[1].dtype, metas[1].shape):
            return False
        pieces = [self.parts.checksums(meta) for meta in metas]
        if pieces[0].keys() == pieces[1].keys():
            return pieces[0] == pieces[1]
        arrays = self._read_fresh([one, other], "numpy", verify=True)
        return bool(arrays[one].tobytes() == arrays[other].tobytes())

    def _restore(
        self, into: object, select: str | Iterable[str] | None, *, verify: bool, strict: bool
    ) -> object:
        restore = self.plan_restore(into, select, strict=strict)
        arrays, wanted = self.fresh(restore.fresh)
        wanted += box_requests(restore, self.metas_for(0), 0)
        self.fetch(wanted, verify=verify)
        restored = restore.finish(arrays)
        beyond = self.local(0) if self.world > 1 and select is None else {}
        unrestored = Unrestored.of(restore, restore.mismatch, beyond)
        unrestored.warn(self.path, rank=0, world=1, saved_world=self.world)
        return restored

    def fetch(
        self,
        wanted: Sequence[BoxRequest],
        *,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads boxes of leaves into their destinations, from the files that hold them.

        Every byte read is verified by default. `CorruptCheckpoint` names file and leaf.
        """
        if self.parts.stored_whole and self._fetch_whole(wanted, verify=verify, progress=progress):
            return
        self.carry_out(self.reads(wanted, verify=verify), verify=verify, progress=progress)

    def reads(self, wanted: Sequence[BoxRequest], *, verify: bool = True) -> list[FileReads]:
        """What has to be read, file by file, to fill the destinations of boxes of leaves."""
        metas = {name: self._meta(name) for name in dict.fromkeys(want.leaf for want in wanted)}
        wanted = [structs.replace(want, leaf=metas[want.leaf].name) for want in wanted if want.box.volume]
        metas = {meta.name: meta for meta in metas.values()}
        boxes = [(want.leaf, want.box) for want in wanted]
        return plan_fetch(self.parts.holding(boxes), wanted, metas, self.path, verify=verify)

    def carry_out(
        self,
        reads: Sequence[FileReads],
        *,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads out of files what `reads` says."""
        fetch(reads, self.reader, verify=verify, progress=progress)

    def _fetch_whole(
        self, wanted: Sequence[BoxRequest], *, verify: bool, progress: Callable[[int], None] | None
    ) -> bool:
        """Whole leaves of one process go straight from its files; False when this is something else."""
        stored = self.parts.leaves_of(0)
        leaves: dict[str, Leaf] = {}
        for want in wanted:
            leaf = stored.get(want.leaf)
            if leaf is None or want.box.shape != leaf.shape or want.leaf in leaves:
                return False
            leaves[want.leaf] = leaf
        reader, whole = self.reader(0), len(leaves) == len(stored)
        if all(
            type(want.destination) is Memory
            and want.destination.nbytes == leaves[want.leaf].fragments[0].nbytes
            for want in wanted
        ):
            addresses = [want.destination.address for want in wanted]
            reader.read_whole_leaves(
                [*leaves.values()], addresses, verify=verify, whole=whole, progress=progress
            )
        else:
            requests = [whole_leaf(leaves[want.leaf], want.destination) for want in wanted]
            reader.read(requests, verify=verify, whole=whole, progress=progress)
        return True

    def misplaced(self) -> str | None:
        """What is wrong with its name: a run's checkpoint is named by its step."""
        name = os.path.basename(self.path)
        if not is_step_name(name) or name == step_name(self.step):
            return None
        return f"it is a checkpoint of step {self.step}, put in the place of another"

    def visible_damage(self, *, far: bool = True) -> Problem | None:
        """The damage that shows without reading arrays: a part or shard that is gone, or another.

        `far`: also of shards on volumes of other hosts that cannot be reached from here. Raises `ReadFailed`
        if the files cannot be examined.
        """
        reason = self.misplaced()
        if reason is not None:
            return Problem(self.manifest_path, reason)
        for rank in self.parts.ranks:
            try:
                self.parts[rank]
            except (CorruptCheckpoint, ReadFailed) as error:
                if not shows_damage(error):
                    raise
                file = getattr(error, "path", None) or self.parts.file_of(rank)
                return Problem(file, getattr(error, "reason", str(error)))
            problem = self.reader(rank).visible_damage(far=far)
            if problem is not None:
                return problem
        return None

    def fresh(
        self, names: Iterable[str], framework: Framework | None = None
    ) -> tuple[dict[str, Any], list[BoxRequest]]:
        """New arrays for leaves, of the framework each was saved from or of this one; what to fetch for them.

        The other framework need not be installed.
        """
        if framework is not None:
            check_framework(framework)
        metas = {name: self._meta(name) for name in names}
        residues = self.parts.residues(metas.values(), ALIGNMENT)
        arrays: dict[str, Any] = {}
        wanted: list[BoxRequest] = []
        for name, meta in metas.items():
            kind = framework or meta.framework
            try:
                arrays[name], memory = empty(meta.dtype, meta.shape, kind, residues.get(name, 0))
            except UnsupportedState as error:
                raise UnsupportedState(f"{meta.name}: {error}") from error
            wanted.append(BoxRequest(meta.name, whole(meta.shape), memory))
        return arrays, wanted

    def _read_fresh(
        self,
        names: Sequence[str],
        framework: Framework | None,
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        if self.parts.stored_whole:
            return self._read_whole(names, framework, verify=verify, progress=progress)
        stored = {name: self._meta(name).name for name in names}
        arrays, wanted = self.fresh(dict.fromkeys(stored.values()), framework)
        self.fetch(wanted, verify=verify, progress=progress)
        return {name: arrays[stored[name]] for name in names}

    def _read_whole(
        self,
        names: Sequence[str],
        framework: Framework | None,
        *,
        verify: bool,
        progress: Callable[[int], None] | None,
    ) -> dict[str, Any]:
        """`_read_fresh` where one process stored every leaf in one piece: with little work for each."""
        if framework is not None:
            check_framework(framework)
        stored = self.parts.leaves_of(0)
        aliases = {**self.parts.aliases, **self.parts.local_aliases(0)}
        arrays: dict[str, Any] = {}
        leaves: list[Leaf] = []
        addresses: list[int] = []
        fresh = FreshArrays()
        for name in names:
            leaf = stored.get(aliases.get(name, name) if aliases else name)
            if leaf is None:
                raise self._no_leaf(name)
            if leaf.name not in arrays:
                (fragment,) = leaf.fragments
                try:
                    arrays[leaf.name], address = fresh.make(
                        leaf.dtype,
                        leaf.shape,
                        framework or leaf.framework,
                        fragment.nbytes,
                        fragment.offset % ALIGNMENT,
                    )
                except UnsupportedState as error:
                    raise UnsupportedState(f"{leaf.name}: {error}") from error
                leaves.append(leaf)
                addresses.append(address)
        self.reader(0).read_whole_leaves(
            leaves, addresses, verify=verify, whole=len(leaves) == len(stored), progress=progress
        )
        if not aliases:
            return arrays
        return {name: arrays[aliases.get(name, name)] for name in names}

    def _read_to_device(
        self, names: Sequence[str], framework: Framework | None, device: Any, *, verify: bool
    ) -> dict[str, Any]:
        """Fresh arrays whose tensors are on a device. Host memory holds one batch at a time."""
        if framework == "numpy":
            raise TypeError('device= is for torch tensors, and framework="numpy" asks for none')
        arrays: dict[str, Any] = {}
        moved: dict[str, Any] = {}
        for batch in self._batches(names):
            for name, array in self._read_fresh(batch, framework, verify=verify).items():
                meta = self._meta(name)
                if meta.name not in moved:  # names of one leaf stay one tensor
                    is_torch = (framework or meta.framework) == "torch"
                    moved[meta.name] = array.to(device) if is_torch else array
                arrays[name] = moved[meta.name]
        return {name: arrays[name] for name in names}

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        nbytes = 0
        for name in names:
            size = _info(self._meta(name), None).nbytes
            if batch and nbytes + size > _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += size
        if batch:
            yield batch

    def _no_leaf(self, name: str) -> LeafNotFound:
        return LeafNotFound(f"{self.path} has no leaf {name!r}; `holdfast show` lists them")

    def reader(self, rank: int) -> ShardReader:
        """The shards of a rank."""
        return ShardReader(self.parts[rank], self._hold, self._tuning)

    def _meta(self, name: str) -> LeafMeta:
        """Of a leaf, under any of its names."""
        if not isinstance(name, str):
            raise TypeError(f"leaves are named by strings, not by {type(name).__name__}: {name!r}")
        found = self.parts.metas.get(self.parts.aliases.get(name, name))
        rank = local_rank(name)
        if found is None and rank is not None:
            found = self.parts.local_metas(rank).get(self.parts.local_aliases(rank).get(name, name))
        if found is None:
            raise self._no_leaf(name)
        return found

    def close(self) -> None:
        """Lets go of the files. What was read stays; leaves that are still to be read are out of reach."""
        self._hold.close()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step {self.step}, {len(self)} leaves, {self.nbytes} bytes>"


def _patterns(select: object) -> list[str]:
    patterns: list[Any] = [select]
    if isinstance(select, Iterable) and not isinstance(select, str | bytes | bytearray):
        patterns = list(select)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"leaves are selected by names or globs, not by {type(pattern).__name__}")
    return patterns


def _info(meta: LeafMeta, alias_of: str | None) -> LeafInfo:
    nbytes = itemsize(meta.dtype)
    for size in meta.shape:
        nbytes *= size
    return LeafInfo(meta.dtype, meta.shape, nbytes, meta.framework, alias_of)


def open_newest(path: str | os.PathLike[str], tuning: Tuning = READING) -> StoredCheckpoint:
    """The checkpoint that a path means: itself, or the newest one of a run."""
    return newest(path, functools.partial(open_any, tuning=tuning))


def open_any(path: str, tuning: Tuning = READING) -> StoredCheckpoint:
    """The checkpoint at a path: one of ours, or else one of another system."""
    try:
        return StoredCheckpoint(path, tuning)
    except (CheckpointNotFound, IncompleteCheckpoint):
        found: StoredCheckpoint | None = open_foreign(path, tuning)
        if found is None:
            raise
        return found


def refuse_fresh(framework: Framework | None, device: Any) -> None:
    """For a load into a target: `TypeError` for what is about fresh arrays."""
    given = "framework=" if framework is not None else "device=" if device is not None else None
    if given is not None:
        raise TypeError(f"{given} goes with fresh arrays; with into= the target decides")
