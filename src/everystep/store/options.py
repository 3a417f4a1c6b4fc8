"""How to write and read: the options that users give, and what writers and readers take from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from everystep.engine import READING, Backend, Tuning
from everystep.engine.tuning import MAX_INFLATION, SMALL_NBYTES, STAGING_NBYTES, WINDOW_NBYTES
from everystep.paths import local_path
from everystep.plan.topology import Writers, check_writers

Replicas = Literal["check", "trust"]

_MAX_NBYTES = (1 << 63) - 1
_LEAST_WINDOW_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """How ranks write. All settings but the volumes are the same on all ranks."""

    tuning: Tuning
    writers: Writers = "all"
    volumes: tuple[str, ...] = ()
    replicas: Replicas = "check"


@dataclass(frozen=True, slots=True)
class Options:
    """How to write and read. The defaults are right unless `everystep doctor` says otherwise.

    Args:
        backend: Force one of ``"uring"``, ``"threads"``, ``"buffered"``.
        memory_nbytes: Bounds the memory of a save: what the engine stages through and, beyond that, the
            copies that a `Checkpointer` makes of what training may change meanwhile. It bounds the memory of
            a read, too.
        small_nbytes: Files up to this size go through the page cache, where latency counts more than
            throughput.
        writers: Which ranks write what several ranks hold: ``"all"``, one per ``"node"`` or ``"socket"``, or
            a number of ranks.
        volumes: Directories that shards go to instead of the checkpoint's own, shared out by how fast each
            is. They may be each node's own.
        replicas: ``"check"`` compares what several ranks should hold alike: all of it when ranks first plan
            who writes what, and a sample of it in every save. ``"trust"`` does not.
        max_inflation: For reading checkpoints of other systems, which may be compressed: arrays that take
            more than so many times the bytes of their files (and more than 256 MiB) raise a
            `DecompressionBomb`. ``float("inf")`` allows any.
    """

    backend: Backend | None = None
    memory_nbytes: int = 256 << 20
    small_nbytes: int = SMALL_NBYTES
    writers: Writers = "all"
    volumes: Sequence[str | os.PathLike[str]] = ()
    replicas: Replicas = "check"
    max_inflation: float = MAX_INFLATION

    def __post_init__(self) -> None:
        check_writers(self.writers)
        if isinstance(self.volumes, (str, os.PathLike)) or not isinstance(self.volumes, Sequence):
            raise ValueError(f"volumes must be a list of directories, not {self.volumes!r}")
        for volume in self.volumes:
            local_path(volume)
        if self.replicas not in get_args(Replicas):
            raise ValueError(f'replicas must be "check" or "trust", not {self.replicas!r}')
        for name, nbytes in (("memory_nbytes", self.memory_nbytes), ("small_nbytes", self.small_nbytes)):
            if type(nbytes) is not int or not 0 <= nbytes <= _MAX_NBYTES:
                raise ValueError(f"{name} must be a number of bytes, an int from 0 on, not {nbytes!r}")

        check_inflation(self.max_inflation)

    @property
    def snapshot_nbytes(self) -> int:
        """The memory that is left for copies."""
        return max(0, self.memory_nbytes - STAGING_NBYTES)

    def tuning(self) -> Tuning:
        window = WINDOW_NBYTES
        depth = max(2, min(STAGING_NBYTES, self.memory_nbytes) // window)
        if self.memory_nbytes < 2 * window:
            window = max(_LEAST_WINDOW_NBYTES, self.memory_nbytes // 2 // 4096 * 4096)
        return Tuning(self.backend, window, depth, self.small_nbytes, self.max_inflation)

    def reading(self) -> Tuning:
        """How to read: with this backend, and within the memory; a read takes three times its windows."""
        window, depth = READING.window_nbytes, READING.depth
        while 3 * window * depth > self.memory_nbytes and (depth > 2 or window > _LEAST_WINDOW_NBYTES):
            depth, window = (depth // 2, window) if depth > 2 else (depth, window // 2)
        return replace(
            READING,
            backend=self.backend,
            window_nbytes=window,
            depth=depth,
            max_inflation=self.max_inflation,
        )

    def write_settings(self) -> WriteSettings:
        """How several ranks, or one to several volumes, write."""
        volumes = tuple(local_path(volume) for volume in self.volumes)
        for volume in volumes:
            try:
                volume.encode()
            except UnicodeEncodeError:
                raise ValueError(f"a volume's path must be UTF-8, as manifests are: {volume!r}") from None
        if len(set(map(os.path.realpath, volumes))) < len(volumes):
            raise ValueError(f"volumes must be different directories, not {list(volumes)}")
        return WriteSettings(self.tuning(), self.writers, volumes, self.replicas)


def reading_tuning(options: Options | None) -> Tuning:
    """How to read with these options."""
    found = checked_options(options)
    return READING if found is None else found.reading()


def check_inflation(given: object) -> None:
    """Raises `ValueError` unless this is a ratio."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 1:
        raise ValueError(f'max_inflation must be a number from 1 on, or float("inf"), not {given!r}')


def checked_options(options: Options | None) -> Options | None:
    """Raises `TypeError` unless these are options."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options must be an everystep.Options(...), not {options!r}")
    return options
