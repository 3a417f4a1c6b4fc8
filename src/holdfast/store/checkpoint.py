"""A committed checkpoint, opened for reading: what it holds, and its bytes on demand.

Opening reads and validates the manifest only. Every later read is verified against its checksums unless told
otherwise. An open checkpoint is held against recycling: retention may give it up, but nobody writes over it.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from holdfast.engine import ALIGNMENT
from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    StateMismatch,
    UnsupportedCheckpoint,
)
from holdfast.format.dtypes import itemsize
from holdfast.format.embedded import PEEK_NBYTES, embeds_root, extract_root
from holdfast.format.manifest import MAX_ROOT_NBYTES, decode_root
from holdfast.format.records import EMBEDDED, Leaf, Root
from holdfast.format.shard import header_nbytes
from holdfast.state import Framework, LeafMeta, Restore, convert, empty, prune, unflatten, values
from holdfast.store.commit import MANIFEST, SHARD
from holdfast.store.failures import reading, require_regular
from holdfast.store.hold import Hold
from holdfast.store.lazy import LazyLeaf
from holdfast.store.partial import PARTIAL
from holdfast.store.run import RETIRED, list_steps, step_name
from holdfast.store.shards import ShardReader, Wanted

_MAX_REPLACED = 100
"""Times that a checkpoint is opened in vain because another took its place meanwhile."""


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A leaf as stored. `alias_of`: the leaf it shares its bytes with."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    framework: Framework
    alias_of: str | None = None


class Checkpoint:
    """One committed checkpoint. Use as a context manager, or `close` it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._hold, self.root = _open(path)
        embedded = any(file.header_xxh3 == EMBEDDED for file in self.root.part.files)
        self.manifest_path = os.path.join(path, SHARD if embedded else MANIFEST)
        self._leaves: dict[str, Leaf] = {leaf.name: leaf for leaf in self.root.part.leaves}
        self._aliases: dict[str, str] = {alias.name: alias.of for alias in self.root.part.aliases}
        self.shards = ShardReader(self.root.part, self._hold)

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
    def metrics(self) -> dict[str, float]:
        return dict(self.root.metrics)

    @functools.cached_property
    def leaves(self) -> dict[str, LeafInfo]:
        """Every leaf by name, tied ones included."""
        found = {name: _info(leaf, None) for name, leaf in self._leaves.items()}
        found.update({name: _info(self._leaves[of], of) for name, of in self._aliases.items()})
        return found

    @functools.cached_property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name."""
        return values(self.root.tree, where=self.manifest_path)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.leaves.values() if info.alias_of is None)

    @property
    def stored_nbytes(self) -> int:
        return sum(file.nbytes for file in self.root.part.files)

    def __getitem__(self, name: str) -> LazyLeaf:
        """A leaf by name; index it to read only that part: ``ck["model.w"][10:20]``."""
        leaf = self._leaf(name)
        return LazyLeaf(name, leaf, self.shards)

    def __contains__(self, name: object) -> bool:
        return name in self._leaves or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self._leaves) + len(self._aliases)

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
        """Names of the leaves that match. A pattern that matches nothing is an error: a typing mistake."""
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        chosen: dict[str, None] = {}
        for pattern in patterns:
            matching = [name for name in self.leaves if fnmatch.fnmatchcase(name, pattern)]
            if not matching and pattern != "*":
                raise StateMismatch(
                    f"no leaf of {self.path} matches {pattern!r}; `holdfast show` lists them",
                    missing=[pattern],
                )
            chosen.update(dict.fromkeys(matching))
        return list(chosen)

    def load(
        self,
        into: object = None,
        *,
        select: str | Iterable[str] | None = None,
        framework: Framework | None = None,
        verify: bool = True,
        strict: bool = True,
    ) -> Any:
        """The whole tree in fresh memory, or put back in place with `into`. See `holdfast.load`."""
        if into is None:
            chosen = list(self.leaves) if select is None else self.select(select)
            arrays = self._read_fresh(chosen, framework, verify=verify)
            tree = self.root.tree if select is None else prune(self.root.tree, set(chosen))
            return unflatten(tree, arrays, where=self.manifest_path)
        if framework is not None:
            raise TypeError("framework= goes with fresh arrays; with into= the target decides")
        return self._restore(into, select, verify=verify, strict=strict)

    def _restore(
        self, into: object, select: str | Iterable[str] | None, *, verify: bool, strict: bool
    ) -> object:
        metas = {
            leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
            for leaf in self._leaves.values()
        }
        only = None if select is None else set(self.select(select))
        restore = Restore(into, self.root.tree, metas, self._aliases, only)
        if restore.mismatch and strict:
            raise restore.mismatch.error(self.path)
        arrays, wanted = self._fresh_wanted(restore.fresh)
        wanted += [Wanted(self._leaf(name), place) for name, place in restore.destinations.items()]
        self.shards.read(wanted, verify=verify, whole=len(wanted) == len(self._leaves))
        restored = restore.finish(arrays)
        if restore.mismatch:
            # From holdfast.load, past Checkpoint.load, to the line that asked for it.
            warnings.warn(
                f"{self.path}: {restore.mismatch}\n  All else has been restored.",
                RuntimeWarning,
                stacklevel=4,
            )
        return restored

    def _read_fresh(
        self,
        names: Sequence[str],
        framework: Framework | None,
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        stored = list(dict.fromkeys(self._aliases.get(name, name) for name in names))
        arrays, wanted = self._fresh_wanted(stored)
        self.shards.read(wanted, verify=verify, whole=len(stored) == len(self._leaves), progress=progress)
        if framework is not None:
            arrays = {name: convert(array, framework) for name, array in arrays.items()}
        return {name: arrays[self._aliases.get(name, name)] for name in names}

    def _fresh_wanted(self, names: Iterable[str]) -> tuple[dict[str, Any], list[Wanted]]:
        arrays: dict[str, Any] = {}
        wanted: list[Wanted] = []
        for name in names:
            leaf = self._leaf(name)
            residue = leaf.fragments[0].offset % ALIGNMENT
            arrays[name], memory = empty(leaf.dtype, leaf.shape, leaf.framework, residue)
            wanted.append(Wanted(leaf, memory))
        return arrays, wanted

    def _leaf(self, name: str) -> Leaf:
        try:
            return self._leaves[self._aliases.get(name, name)]
        except KeyError:
            raise KeyError(f"{self.path} has no leaf {name!r}") from None

    def close(self) -> None:
        """Lets go of the files. What was read stays; leaves that are still to be read are out of reach."""
        self._hold.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step {self.step}, {len(self)} leaves, {self.nbytes} bytes>"


def resolve(path: str | os.PathLike[str]) -> str:
    """The checkpoint a path means: itself, or the newest committed one of a run."""
    where = os.path.abspath(os.fspath(path))
    if where.endswith((PARTIAL, RETIRED)):
        raise IncompleteCheckpoint("this is not a committed checkpoint: the save did not finish", path=where)
    if is_checkpoint(where):
        return where
    if not os.path.isdir(where):
        hint = "; a save to it did not finish" if os.path.isdir(where + PARTIAL) else ""
        raise CheckpointNotFound(f"there is no checkpoint at {where}{hint}")
    steps = list_steps(where)
    if steps:
        return os.path.join(where, step_name(steps[-1]))
    raise IncompleteCheckpoint(
        "no manifest and no checkpoints inside: not a checkpoint, nor a run with one", path=where
    )


def is_checkpoint(directory: str) -> bool:
    """Whether a directory looks like one checkpoint, whole or not: it has a manifest, or what may hold it."""
    return any(os.path.exists(os.path.join(directory, name)) for name in (MANIFEST, SHARD))


def _read_root(directory: str, path: str) -> Root:
    """The manifest of the checkpoint at `path`: a file by itself, or else in the header of its only shard."""
    where = os.path.join(path, MANIFEST)
    try:
        with reading(where):
            require_regular(os.path.join(directory, MANIFEST), where)
            with open(os.path.join(directory, MANIFEST), "rb") as file:
                data = file.read(MAX_ROOT_NBYTES + 1)
    except OSError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return _read_embedded(directory, path)
        raise
    root = decode_root(data, where)
    _refuse_second_manifest(directory, path)
    return root


def _read_embedded(directory: str, path: str) -> Root:
    where = os.path.join(path, SHARD)
    try:
        with reading(where):
            nbytes = require_regular(os.path.join(directory, SHARD), where).st_size
            with open(os.path.join(directory, SHARD), "rb") as file:
                header = file.read(PEEK_NBYTES)
                header += file.read(max(0, header_nbytes(header, nbytes, where) - PEEK_NBYTES))
    except OSError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            missing = os.path.join(path, MANIFEST)
            raise IncompleteCheckpoint("the manifest is missing", path=missing) from error
        raise
    return extract_root(header, nbytes, where)


def _refuse_second_manifest(directory: str, path: str) -> None:
    """Two that disagree could each be the right one: nobody writes such a checkpoint."""
    try:
        require_regular(os.path.join(directory, SHARD), os.path.join(path, SHARD))
        with open(os.path.join(directory, SHARD), "rb") as file:
            beginning = file.read(PEEK_NBYTES)
    except (OSError, CorruptCheckpoint):
        return  # whoever needs the shard is told what is wrong with it
    if embeds_root(beginning):
        reason = f"this file holds a manifest, and there is a {MANIFEST} beside it"
        raise CorruptCheckpoint(reason, path=os.path.join(path, SHARD))


def _open(path: str) -> tuple[Hold, Root]:
    """Holds a checkpoint and reads its manifest. One that is replaced at this very moment is opened anew."""
    for _ in range(_MAX_REPLACED):
        hold = Hold(path)
        try:
            root = _read_root(hold.directory, path)
            _refuse_unknown_layout(root, path)
            if hold.pin(file.name for file in root.part.files) or hold.current:
                return hold, root
        except IncompleteCheckpoint:
            if hold.current:
                hold.close()
                raise
        except BaseException:
            hold.close()
            raise
        hold.close()
    raise CheckpointNotFound(f"{path} is being replaced all the time")


def _refuse_unknown_layout(root: Root, path: str) -> None:
    if root.world != 1 or root.parts or any(len(leaf.fragments) != 1 for leaf in root.part.leaves):
        raise UnsupportedCheckpoint(
            f"{path} was written by several processes, which this version of Holdfast cannot read; "
            "upgrade Holdfast"
        )


def _info(leaf: Leaf, alias_of: str | None) -> LeafInfo:
    nbytes = itemsize(leaf.dtype)
    for size in leaf.shape:
        nbytes *= size
    return LeafInfo(leaf.dtype, leaf.shape, nbytes, leaf.framework, alias_of)
