"""A fork while direct I/O is under way (data-loader workers do that) harms neither side.

The fork happens inside a callback of the job itself, so transfers of the windows around it are under way.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from everystep import engine
from everystep.engine import Backend, Consumed, Memory, Produced, ReadPiece, Tuning, WritePiece, fs
from support.states.random_pieces import PAGE, Bytes, checksums, memory_of, place, random_bytes, small_windows
from support.states.waiting_jobs import PATIENCE, Gate

LARGE = 3 << 20
COUNT = 6


def child(work: Callable[[], bool]) -> int:
    """Forks; the child does the work, in limited time, and never comes back to pytest. Returns its id."""
    pid = os.fork()
    if pid == 0:
        _in_child(work)
    return pid


def _in_child(work: Callable[[], bool]) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(PATIENCE))
    try:
        os._exit(0 if work() else 1)
    finally:
        os._exit(2)  # it raised


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def interleaved() -> tuple[list[Bytes], list[int], list[int], int]:
    """Large arrays and a page for a callback between them: arrays, offsets, the callbacks' offsets, total."""
    step = LARGE + PAGE
    arrays = [place(random_bytes(LARGE, n), 0) for n in range(COUNT)]
    offsets = [n * step for n in range(COUNT)]
    return arrays, offsets, [offset + LARGE for offset in offsets], COUNT * step


def test_forks_during_a_write(backend: Backend, tmp_path: Path) -> None:
    """Each child sees the memory as it was and scribbles over its own copy; the file is exact anyway."""
    arrays, offsets, calls, nbytes = interleaved()
    known = [engine.xxh3_64(array) for array in arrays]
    children: list[int] = []

    def check_and_scribble() -> bool:
        intact = [engine.xxh3_64(array) for array in arrays] == known
        for array in arrays:
            array[:] = 0xFF
        return intact

    def fill(window: memoryview, offset: int) -> None:
        children.append(child(check_and_scribble))
        window[:] = bytes([len(children)]) * len(window)

    pieces = sorted(
        [WritePiece(offset, memory_of(array)) for offset, array in zip(offsets, arrays, strict=True)]
        + [WritePiece(offset, Produced(PAGE, fill)) for offset in calls],
        key=lambda piece: piece.offset,
    )
    job = engine.write(tmp_path / "f", nbytes, pieces, tuning=Tuning(backend, 256 << 10, 8, 0))
    job.wait(PATIENCE)
    fs.sync([job])
    assert [status(pid) for pid in children] == [0] * COUNT
    whole = np.fromfile(tmp_path / "f", np.uint8)
    for number, (array, offset, call) in enumerate(zip(arrays, offsets, calls, strict=True)):
        assert engine.xxh3_64(array) == known[number]
        assert np.array_equal(whole[offset : offset + LARGE], array)
        assert (whole[call : call + PAGE] == number + 1).all()


def test_forks_during_a_read(backend: Backend, tmp_path: Path) -> None:
    """Children write to all of their copy of the destination; the parent still gets every byte."""
    arrays, offsets, calls, nbytes = interleaved()
    whole = np.zeros(nbytes, np.uint8)
    for array, offset in zip(arrays, offsets, strict=True):
        whole[offset : offset + LARGE] = array
    whole.tofile(tmp_path / "f")
    out = place(np.full(nbytes, 0xEE, np.uint8), 0)
    children: list[int] = []

    def scribble() -> bool:
        out[:] = 0xFF
        return bool((out == 0xFF).all())

    pieces = []
    for offset, call in zip(offsets, calls, strict=True):
        there = Memory(out.ctypes.data + offset, LARGE, out)
        pieces.append(ReadPiece(offset, there, checksums(whole[offset : offset + LARGE])))
        there_too = Consumed(PAGE, lambda window, inside: children.append(child(scribble)))
        pieces.append(ReadPiece(call, there_too, checksums(whole[call : call + PAGE])))
    found = engine.read(tmp_path / "f", pieces, tuning=Tuning(backend, 256 << 10, 8, 0))
    assert [status(pid) for pid in children] == [0] * COUNT
    assert found == []
    for offset in offsets:
        assert np.array_equal(out[offset : offset + LARGE], whole[offset : offset + LARGE])


def test_a_child_can_drop_the_jobs_it_inherited_and_start_its_own(backend: Backend, tmp_path: Path) -> None:
    gate = Gate(50 * PAGE)
    held = [gate.start(tmp_path / "parent", backend)]

    def work() -> bool:
        held.clear()  # its thread does not exist here, so there is nothing to wait for
        data = random_bytes(50 * PAGE, 1)
        pieces = [WritePiece(0, memory_of(data))]
        job = engine.write(tmp_path / "child", data.nbytes, pieces, tuning=small_windows(backend))
        job.wait(PATIENCE)
        fs.sync([job], os.fspath(tmp_path))
        return (tmp_path / "child").read_bytes() == data.tobytes()

    pid = child(work)
    assert status(pid) == 0
    gate.opened.set()
    held[0].wait(PATIENCE)
    fs.sync(held)
    assert (tmp_path / "parent").read_bytes() == bytes([7]) * 50 * PAGE


def test_a_child_can_sync_after_its_parent_did(backend: Backend, tmp_path: Path) -> None:
    """The ring that a thread keeps for its syncs is not the child's to use."""

    def save(name: str) -> bool:
        job = engine.write(tmp_path / name, PAGE, [], tuning=small_windows(backend))
        job.wait(PATIENCE)
        fs.sync([job], os.fspath(tmp_path))
        return (tmp_path / name).stat().st_size == PAGE

    assert save("before")
    pid = child(lambda: save("child"))
    assert save("meanwhile")
    assert status(pid) == 0
    assert save("after")


def test_a_child_does_not_use_the_staging_that_its_parent_keeps(backend: Backend, tmp_path: Path) -> None:
    """It is not in the child's memory at all. Sizes grow: a kept one can be too small."""

    def write(name: str, count: int) -> bool:
        data = random_bytes(count * LARGE, count)
        job = engine.write(
            tmp_path / name,
            data.nbytes,
            [WritePiece(0, memory_of(data))],
            tuning=Tuning(backend, LARGE, count),
        )
        job.wait(PATIENCE)
        fs.sync([job])
        return bool(np.array_equal(np.fromfile(tmp_path / name, np.uint8), data))

    for count in (2, 4):
        assert write(f"parent-{count}", count)
        assert status(child(partial(write, f"child-{count}", count))) == 0
        assert write(f"again-{count}", count)
