"""What a call costs this process: the wall clock, the CPU clock, and the peak of resident memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from everystep_study.harness.results import CPU_SECONDS, PEAK_NBYTES, SECONDS

T = TypeVar("T")


def cost_of(call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """The result of `call` and what it cost.

    CPU time is user plus system of all our threads. The workers that io_uring starts in the kernel are
    threads of this process and are counted; the kernel's own flusher threads, which write back what
    buffered peers leave dirty, are not: that error is in favour of the peers.

    Peak memory is the kernel's high-water mark of resident memory (VmHWM). It only ever rises, so it is set
    back first (writing 5 to clear_refs). Memory that an earlier system freed but the allocator kept would be
    used again unseen, so it is returned first.
    """
    return_free_memory()
    before = reset_peak()
    cpu = cpu_seconds()
    clock = time.perf_counter()
    result = call()
    readings = {SECONDS: time.perf_counter() - clock, CPU_SECONDS: cpu_seconds() - cpu}
    return result, readings | peak_since(before)


def wall_seconds(call: Callable[[], object]) -> float:
    """How long `call` takes, and nothing else: for calls that are timed beside a training."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cpu_seconds(*, children: bool = False) -> float:
    found = [resource.getrusage(resource.RUSAGE_SELF)]
    if children:
        found.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def reset_peak() -> int | None:
    """Sets the high-water mark back; None where the kernel offers no way (then memory is not reported)."""
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return None
    return _peak_nbytes()


def peak_since(before: int | None) -> dict[str, float]:
    """The growth of the high-water mark since `reset_peak`, as readings."""
    after = None if before is None else _peak_nbytes()
    return {} if before is None or after is None else {PEAK_NBYTES: float(max(0, after - before))}


def return_free_memory() -> None:
    gc.collect()
    # glibc only; other C libraries either lack it or give memory back by themselves.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _peak_nbytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


class ReservedMemory:
    """`nbytes` of touched memory, held between measurements and freed just before each.

    A virtual machine whose host takes back unused memory pays for its return page by page, up to seconds per
    GiB. That cost would fall on the first that is measured after a pause. Memory that was freed a moment ago
    is there for all alike; on other machines this makes no difference.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._block: mmap.mmap | None = None
        self._take()

    @contextmanager
    def freed(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self._take()

    def close(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None

    def _take(self) -> None:
        if self._nbytes < mmap.PAGESIZE:
            return
        self._block = mmap.mmap(-1, self._nbytes)
        view = np.frombuffer(self._block, np.uint8)
        view[:: mmap.PAGESIZE] = 1
        del view  # a mapping with a view of it cannot be closed
