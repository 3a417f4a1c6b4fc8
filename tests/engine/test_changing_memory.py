"""Whatever happens to memory while it is written, the file agrees with its checksums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everystep import engine
from everystep.engine import (
    CHUNK_NBYTES,
    Backend,
    Memory,
    Produced,
    ReadPiece,
    Strided,
    Tuning,
    Unkept,
    WritePiece,
    fs,
)
from support.states.changing_memory import changing
from support.states.random_pieces import PAGE, Bytes, in_pages, memory_of, random_bytes

NBYTES = 9 * CHUNK_NBYTES + 777
SAVES = 4


def source_of(array: Bytes, kind: str) -> Memory | Strided | Produced:
    if kind == "memory":
        return memory_of(array)
    if kind == "strided":
        half = array[: array.nbytes // 2 * 2].reshape(-1, 2)[:, 0]
        return Strided(half.ctypes.data, 1, half.shape, half.strides, half)

    def fill(window: memoryview, offset: int) -> None:
        np.frombuffer(window, np.uint8)[:] = array[offset : offset + len(window)]

    return Produced(array.nbytes, fill)


@pytest.mark.parametrize("small_nbytes", [0, 1 << 40], ids=["windows", "one write"])
@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "small pages"])
@pytest.mark.parametrize(
    ("kind", "residue"), [("memory", 0), ("memory", 7), ("strided", 0), ("produced", 0)], ids=str
)
def test_a_file_agrees_with_its_checksums_while_memory_changes(
    backend: Backend, tmp_path: Path, small_nbytes: int, kind: str, huge: bool, residue: int
) -> None:
    """Chunks begin anywhere in a window, and many lie in two. A residue keeps copies from being aligned."""
    offset = PAGE + 40
    array = in_pages(random_bytes(NBYTES, 1), offset + residue, huge=huge)
    source = source_of(array, kind)
    total = (offset + NBYTES) // PAGE * PAGE + PAGE
    tuning = Tuning(backend, 4 * CHUNK_NBYTES, 4, small_nbytes)
    path = tmp_path / "f"
    with changing(array):
        for _ in range(SAVES):
            job = engine.write(path, total, [WritePiece(offset, source)], tuning=tuning, recycle=True)
            job.wait()
            (said,) = job.checksums()
            fs.sync([job])  # until then the file is leased, and who opens it waits
            piece = ReadPiece(offset, Unkept(source.nbytes), said)
            assert engine.read(path, [piece], tuning=tuning) == []


def test_what_is_packed_agrees_with_its_checksums_while_memory_changes() -> None:
    array = random_bytes(NBYTES, 1)
    with changing(array):
        for _ in range(SAVES):
            packed = engine.pack([WritePiece(0, memory_of(array))], NBYTES)
            parts = [packed.data[at : at + CHUNK_NBYTES] for at in range(0, NBYTES, CHUNK_NBYTES)]
            assert packed.checksums() == ["".join(f"{engine.xxh3_64(part):016x}" for part in parts)]
