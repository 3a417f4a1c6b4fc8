"""The raw device: what a checkpoint is compared with.

A bare loop over one aligned buffer, past the page cache, into a new preallocated file that is synced at the
end. Threads keep several large transfers under way. Each takes the device milliseconds, Python microseconds.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BUFFER_NBYTES = 128 << 20
"""Larger than any cache, so that the device fetches from memory as it does in a real save."""
HUGE_PAGE_NBYTES = 2 << 20
BLOCK_NBYTES = 4096
WRITE_WINDOW_NBYTES, READ_WINDOW_NBYTES = 4 << 20, 8 << 20
DEPTH = 8


def raw_write(path: Path, nbytes: int, *, huge_pages: bool = False) -> float:
    """Seconds that a durable write of `nbytes` (whole blocks of them) into a new file takes.

    In normal pages, as tensors are; with `huge_pages` the device has fewer pieces to gather, and is faster.
    """
    nbytes -= nbytes % BLOCK_NBYTES
    memory = _buffer(WRITE_WINDOW_NBYTES, huge_pages)
    file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            _start(pool)
            began = time.perf_counter()
            os.posix_fallocate(file, 0, nbytes)
            _move(pool, file, memory, nbytes, WRITE_WINDOW_NBYTES, os.pwritev)
            os.fdatasync(file)
            return time.perf_counter() - began
    finally:
        os.close(file)


def raw_read(path: Path, nbytes: int, *, huge_pages: bool = False) -> float:
    """Seconds that reading `nbytes` (whole blocks of them) of a file takes."""
    nbytes -= nbytes % BLOCK_NBYTES
    memory = _buffer(READ_WINDOW_NBYTES, huge_pages)
    file = _open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            _start(pool)
            began = time.perf_counter()
            _move(pool, file, memory, nbytes, READ_WINDOW_NBYTES, os.preadv)
            return time.perf_counter() - began
    finally:
        os.close(file)


def _move(
    pool: ThreadPoolExecutor,
    file: int,
    memory: memoryview,
    nbytes: int,
    window: int,
    function: Callable[[int, list[memoryview], int], int],
) -> None:
    def one(low: int) -> None:
        place, end = low % len(memory), min(low + window, nbytes)
        while low < end:  # a transfer may fall short
            low += function(file, [memory[place : place + end - low]], low)
            place = low % len(memory)

    for _ in pool.map(one, range(0, nbytes, window)):
        pass


def _start(pool: ThreadPoolExecutor) -> None:
    """Threads that exist cost the measurement nothing."""
    for _ in pool.map(time.sleep, [0.001] * DEPTH):
        pass


def _buffer(window: int, huge_pages: bool) -> memoryview:
    # The default would be shared memory, which has no huge pages.
    mapped = mmap.mmap(-1, BUFFER_NBYTES + HUGE_PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = memoryview(mapped)
    first = -np.frombuffer(whole, np.uint8).ctypes.data % HUGE_PAGE_NBYTES
    memory = whole[first : first + BUFFER_NBYTES]
    np.frombuffer(memory, np.uint8)[:] = 0x5A
    return memory


def _open(path: Path, flags: int) -> int:
    """Past the page cache, where the file system can do that."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_CREAT:
            path.unlink(missing_ok=True)  # some file systems make the file before they say no
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
