"""Snapshots of memory, fingerprints, and waiting for part of a write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from everystep import engine
from everystep.engine import Memory, Produced, Strided, Tuning, WritePiece
from everystep.engine.faults import injected


def memory(array: np.ndarray) -> Memory:
    return Memory(array.ctypes.data, array.nbytes, array)


def test_copy_takes_plain_strided_and_fetched_memory() -> None:
    plain = np.arange(1000, dtype=np.int32)
    turned = np.arange(60, dtype=np.float64).reshape(6, 10).T
    strided = Strided(turned.ctypes.data, 8, turned.shape, turned.strides, turned)
    fetched = Produced(100, lambda window, offset: window.__setitem__(slice(None), b"x" * len(window)))
    buffer = np.full(6000, 255, np.uint8)

    engine.copy([WritePiece(0, memory(plain)), WritePiece(4096, strided), WritePiece(5000, fetched)], buffer)

    assert buffer[:4000].tobytes() == plain.tobytes()
    assert buffer[4096:4576].tobytes() == np.ascontiguousarray(turned).tobytes()
    assert buffer[5000:5100].tobytes() == b"x" * 100
    assert (buffer[4000:4096] == 255).all()


def test_copy_refuses_a_buffer_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="past the end"):
        engine.copy([WritePiece(0, memory(np.zeros(100, np.uint8)))], np.empty(99, np.uint8))


@pytest.mark.parametrize("nbytes", [1, 64, 4096, 4097, 100_000, 10_000_019])
def test_fingerprints_notice_a_dense_change_and_nothing_else(nbytes: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    before = engine.fingerprints([memory(array), memory(array)])
    assert engine.fingerprints([memory(array), memory(array)]) == before
    array += 1
    assert engine.fingerprints([memory(array)])[0] != before[0]


@pytest.mark.parametrize("place", [0, -1])
def test_fingerprints_look_at_both_ends(place: int) -> None:
    array = np.zeros(1 << 20, np.uint8)
    before = engine.fingerprints([memory(array)])
    array[place] = 1
    assert engine.fingerprints([memory(array)]) != before


@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (11, 13), (3, 100, 1), (40, 50, 9)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.complex128])
def test_fingerprints_are_the_same_however_an_array_lies_in_memory(
    shape: tuple[int, ...], kind: type
) -> None:
    array = (np.arange(np.prod(shape), dtype=np.int64) % 251).astype(kind).reshape(shape)
    turned = np.array(array.T, order="C", copy=True).T
    flat = array.reshape(-1).view(np.uint8)

    def fill(window: memoryview, offset: int) -> None:
        assert offset % array.itemsize == len(window) % array.itemsize == 0  # whole elements only
        window[:] = flat[offset : offset + len(window)].tobytes()

    strided = Strided(turned.ctypes.data, turned.itemsize, turned.shape, turned.strides, turned)
    ways = [memory(array), strided, Produced(array.nbytes, fill)]
    assert len(set(engine.fingerprints(ways))) == 1
    if array.size:
        before = engine.fingerprints([strided])
        turned += 1
        assert engine.fingerprints([strided]) != before


def test_bytes_that_have_left_may_change_while_the_rest_is_written(tmp_path: Path) -> None:
    tuning = Tuning("threads", window_nbytes=1 << 20, depth=2)
    arrays = [np.full(8 << 20, value, np.uint8) for value in (1, 2)]
    pieces = [WritePiece(index << 23, memory(array)) for index, array in enumerate(arrays)]
    job = engine.write(tmp_path / "file", 16 << 20, pieces, tuning=tuning)
    assert job.wait_for_nbytes(8 << 20, 60)
    arrays[0][:] = 77
    job.wait()
    assert (np.fromfile(tmp_path / "file", np.uint8).reshape(2, -1) == [[1], [2]]).all()
    assert job.wait_for_nbytes(1 << 60, 0)  # nothing more will come


def test_waiting_for_part_of_a_write_ends_when_the_write_fails(tmp_path: Path) -> None:
    array = np.zeros(8 << 20, np.uint8)
    with injected("write:2:EIO"):
        job = engine.write(
            tmp_path / "file",
            array.nbytes,
            [WritePiece(0, memory(array))],
            tuning=Tuning("threads", window_nbytes=1 << 20, depth=2),
        )
        assert job.wait_for_nbytes(array.nbytes, 60)
        with pytest.raises(OSError, match=os.strerror(5)):
            job.wait()
