"""A committed checkpoint, as users see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from everystep.engine import READING, Tuning
from everystep.paths import local_path
from everystep.state import Framework
from everystep.state.mismatch import offering
from everystep.store.read.foreign import renaming
from everystep.store.read.stored_checkpoint import LeafInfo, open_any
from everystep.store.read.subtree import leaf_or_subtree


class Checkpoint:
    """One committed checkpoint, open for reading. Use it as a context manager, or `close` it.

    Opening reads and validates the manifest only. Every later read is verified against its checksums unless
    told otherwise. However many ranks wrote the checkpoint, leaves are whole arrays here. As long as it is
    open, retention may remove it from its run, but no save writes over its files.
    """

    def __init__(self, path: str, tuning: Tuning = READING, *, as_training: bool | None = None) -> None:
        self._stored = open_any(local_path(path), tuning)
        try:
            self._stored.arrange(as_training)
        except BaseException:
            self._stored.close()
            raise

    @property
    def path(self) -> str:
        return self._stored.path

    @property
    def step(self) -> int:
        return self._stored.step

    @property
    def id(self) -> str:
        return self._stored.id

    @property
    def created(self) -> float:
        """Unix time of the save."""
        return self._stored.created

    @property
    def world(self) -> int:
        """How many ranks took part in the save."""
        return self._stored.world

    @property
    def metrics(self) -> dict[str, float]:
        return self._stored.metrics

    @property
    def leaves(self) -> dict[str, LeafInfo]:
        """Every leaf by name, tied ones and those of single ranks included."""
        return self._stored.shown_leaves

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of leaves, and the leaf that each means."""
        return self._stored.aliases

    @property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name; where every rank has its own, that of rank 0."""
        return self._stored.values

    @property
    def nbytes(self) -> int:
        """The size of the arrays that one process loads; where every rank has its own, those of rank 0."""
        return self._stored.nbytes

    @property
    def stored_nbytes(self) -> int:
        """The size of the shards."""
        return self._stored.stored_nbytes

    def __getitem__(self, name: str) -> Any:
        """A leaf by name; index it to read only that part: ``ck["model.w"][10:20]``.

        The name of a subtree gives all of its leaves: ``ck["model"]["w"]``, and ``ck["model"].read()``.
        """
        return leaf_or_subtree(self._stored, name)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def read(
        self,
        select: str | Iterable[str] = "*",
        *,
        framework: Framework | None = None,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """The leaves whose names match a glob, or of a subtree (or any of several), as arrays in memory."""
        return self._stored.read(select, framework=framework, verify=verify, progress=progress)

    def select(self, patterns: str | Iterable[str]) -> list[str]:
        """Names of the leaves that match a glob or are in a subtree. Each pattern must match something.

        Of what belongs to single ranks, that of rank 0 is also matched by its name without ``@0.``.
        """
        return self._stored.select(patterns)

    def load(
        self,
        into: object = None,
        *,
        select: str | Iterable[str] | None = None,
        framework: Framework | None = None,
        device: Any = None,
        verify: bool = True,
        strict: bool = True,
        rename: object = None,
    ) -> Any:
        """The whole tree in fresh memory, or put back in place with `into`. See `everystep.load`."""
        with offering("into", "rename", "select", "strict"):
            return self._stored.load(
                into,
                select=select,
                framework=framework,
                device=device,
                verify=verify,
                strict=strict,
                rename=renaming(rename),
            )

    def close(self) -> None:
        """Releases the files. Arrays that were read stay; leaves that were not can no longer be read."""
        self._stored.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step {self.step}, {len(self)} leaves, {self.nbytes} bytes>"
