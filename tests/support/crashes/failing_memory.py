"""C++ code that runs out of memory at a chosen allocation, by a preloaded library with its `operator new`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = """
#include <cstdlib>
#include <new>

static thread_local long left = 0;  // fails when this gets to 0
static thread_local bool armed = false, failed = false;

extern "C" void fail_at(long nth) { left = nth; armed = nth > 0; failed = false; }
extern "C" int has_failed() { return failed; }

void* operator new(std::size_t nbytes) {
  if (armed && --left == 0) {
    armed = false;
    failed = true;
    throw std::bad_alloc();
  }
  void* const found = std::malloc(nbytes == 0 ? 1 : nbytes);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}
void operator delete(void* found) noexcept { std::free(found); }
void operator delete(void* found, std::size_t) noexcept { std::free(found); }
"""


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def built(directory: Path) -> str:
    """The path of the library, for ``LD_PRELOAD``."""
    source, library = directory / "failing_memory.cpp", directory / "failing_memory.so"
    source.write_text(SOURCE)
    command = [compiler() or "c++", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return str(library)


class FailingMemory:
    """The preloaded library, in the process that has it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])

    @contextmanager
    def at(self, nth: int) -> Iterator[None]:
        """The nth allocation of this thread in the block fails, and no other."""
        self._library.fail_at(ctypes.c_long(nth))
        try:
            yield
        finally:
            self.happened = bool(self._library.has_failed())
            self._library.fail_at(ctypes.c_long(0))
