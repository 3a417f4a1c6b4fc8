"""Emptying the page cache before a load, and finding out whether it really is empty.

A file that was just written is still in memory, and reading it back from there says nothing about a restart.
Root may empty the whole cache; anyone may ask for one file to be forgotten (which tmpfs and some network
filesystems ignore). So the temperature reported is not what was asked for but what `mincore` then saw.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from everystep_study.harness.results import Temperature

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_COLD_FRACTION = 0.01
"""A few pages may come back on their own (a header that the kernel reads ahead): one in a hundred is cold."""


def empty(files: Sequence[Path]) -> tuple[Temperature, str]:
    """Remove these files from memory; returns how cold they then are, and how it was done."""
    os.sync()  # only clean pages can be dropped
    method = "drop_caches"
    if not _drop_everything():
        method = "fadvise"
        for file in files:
            forget(file)
    fraction = resident_fraction(files)
    if fraction is None or fraction > _COLD_FRACTION:
        return "warm", "the page cache could not be emptied"
    return "cold", method


def resident_fraction(files: Sequence[Path]) -> float | None:
    """Which share of the files' pages is in memory; None where the kernel will not say."""
    pages = resident = 0
    for file in files:
        seen = _resident_pages(file)
        if seen is None:
            return None
        resident += seen[0]
        pages += seen[1]
    return resident / pages if pages else 0.0


def _drop_everything() -> bool:
    try:
        _DROP_CACHES.write_text("3\n")
    except OSError:
        return False  # not root, or a container whose /proc/sys is read-only
    return True


def forget(file: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _resident_pages(file: Path) -> tuple[int, int] | None:
    """Resident and all pages of a file. Mapping it faults nothing in, so looking does not warm it."""
    nbytes = file.stat().st_size
    if nbytes == 0:
        return 0, 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), nbytes, prot=mmap.PROT_READ) as mapped:
        seen = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        del view  # a mapping with a view of it cannot be closed
        answer = ctypes.c_void_p(seen.ctypes.data)
        if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(nbytes), answer) != 0:
            return None
    # The lowest bit of each byte is the answer; the others are reserved.
    return int(np.count_nonzero(seen & 1)), len(seen)
