"""Which backend a directory gets, and why.

The answer comes from trying (a real ring, a real direct write into an unnamed file), once per filesystem and
process. ``EVERYSTEP_BACKEND`` or an explicit choice overrides it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Literal, get_args

from everystep import _native
from everystep.errors import EngineUnavailable

Backend = Literal["uring", "threads", "buffered"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this machine and one filesystem can do. The `*_reason` fields say why not."""

    uring: bool
    uring_reason: str
    direct: bool
    direct_reason: str
    memory_alignment: int
    offset_alignment: int

    @property
    def best(self) -> Backend:
        if not self.direct:
            return "buffered"
        return "uring" if self.uring else "threads"


_known: dict[int, Capabilities] = {}


def capabilities(directory: str | os.PathLike[str] | _native.OpenDirectory) -> Capabilities:
    """Probes the filesystem of an existing, writable directory."""
    if isinstance(directory, _native.OpenDirectory):
        where = f"/proc/self/fd/{directory.fileno()}"
    else:
        where = os.fspath(directory)
    device = os.stat(where).st_dev
    found = _known.get(device)
    if found is None:
        try:
            direct, memory_alignment, offset_alignment, direct_reason = _native.probe(where)
        except OSError as error:
            error.filename = _shown(directory)
            raise
        uring, uring_reason = _native.uring_available()
        found = Capabilities(uring, uring_reason, direct, direct_reason, memory_alignment, offset_alignment)
        _known[device] = found
    return found


def choose_read_backend(
    path: str | os.PathLike[str], forced: str | None = None, *, may_write: bool = True
) -> Backend:
    """The backend for reading an existing file. Works in directories that cannot be written.

    `may_write`: whether a trial may write beside it; what is found out serves all files of the directory.
    """
    try:
        if may_write:
            return choose_backend(os.path.dirname(path), forced)
        best = _read_trial(path)
    except OSError:
        best = _read_trial(path)
    forced = _forced(forced)
    if forced is None or forced == best or (forced, best) == ("threads", "uring"):
        return forced or best
    raise EngineUnavailable(
        f"backend {forced!r} cannot read {os.fspath(path)}; use {best!r}, or leave the choice to Everystep"
    )


def _read_trial(path: str | os.PathLike[str]) -> Backend:
    """Finds out by a direct read of the file's first block, if no trial write is possible."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return "buffered"
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as block:
            os.preadv(descriptor, [block], 0)
    except OSError:
        return "buffered"
    finally:
        os.close(descriptor)
    return "uring" if _native.uring_available()[0] else "threads"


def choose_backend(
    directory: str | os.PathLike[str] | _native.OpenDirectory, forced: str | None = None
) -> Backend:
    """The backend for files in `directory`: the forced one (or ``EVERYSTEP_BACKEND``), else the best."""
    forced = _forced(forced)
    if forced is None:
        return capabilities(directory).best
    if forced == "buffered":
        return "buffered"
    able = capabilities(directory)
    if not able.direct:
        raise EngineUnavailable(
            f"backend {forced!r} needs direct I/O, which {_shown(directory)} does not have "
            f"({able.direct_reason}); use 'buffered', or leave the choice to Everystep"
        )
    if forced == "uring" and not able.uring:
        raise EngineUnavailable(
            f"backend 'uring' is not available ({able.uring_reason}); "
            "use 'threads', or leave the choice to Everystep"
        )
    return forced


def _shown(directory: str | os.PathLike[str] | _native.OpenDirectory) -> str:
    return directory.path if isinstance(directory, _native.OpenDirectory) else os.fspath(directory)


def _forced(argument: str | None) -> Backend | None:
    forced = argument or os.environ.get("EVERYSTEP_BACKEND") or None
    for known in BACKENDS:
        if forced == known:
            return known
    if forced is not None:
        raise EngineUnavailable(f"unknown backend {forced!r}: choose one of {', '.join(BACKENDS)}")
    return None
