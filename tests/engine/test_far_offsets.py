"""Offsets beyond 4 GiB, in files that are mostly holes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everystep import engine
from everystep.engine import (
    CHUNK_NBYTES,
    Backend,
    Consumed,
    Damage,
    Memory,
    Padding,
    ReadPiece,
    Strided,
    Tuning,
    Unkept,
)
from support.states.random_pieces import PAGE, checksums, memory_of, place, random_bytes

FAR = 5 << 30


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """Five GiB of hole and three chunks of random bytes after it."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(FAR)
        file.write(random_bytes(3 * CHUNK_NBYTES, 4).tobytes())
    if path.stat().st_blocks * 512 > FAR:
        pytest.skip("this filesystem has no sparse files")
    return path


@pytest.mark.parametrize("congruent", [True, False])
def test_a_piece_beyond_four_gigabytes_is_read_from_where_it_lies(
    backend: Backend, sparse: Path, congruent: bool
) -> None:
    data = random_bytes(3 * CHUNK_NBYTES, 4)
    at, nbytes = 1234, 2 * CHUNK_NBYTES + 99
    out = place(np.zeros(nbytes, np.uint8), at if congruent else 1)
    piece = ReadPiece(FAR + at, memory_of(out), checksums(data[at : at + nbytes]))
    assert engine.read(sparse, [piece], tuning=Tuning(backend, 256 << 10, 4, 0)) == []
    assert np.array_equal(out, data[at : at + nbytes])


def test_near_and_far_pieces_in_one_read_skip_what_lies_between(backend: Backend, sparse: Path) -> None:
    data = random_bytes(3 * CHUNK_NBYTES, 4)
    far = np.zeros((8, 1000), np.uint8)
    drained = np.zeros(5000, np.uint8)

    def drain(window: memoryview, offset: int) -> None:
        drained[offset : offset + len(window)] = np.frombuffer(window, np.uint8)

    pieces = [
        ReadPiece(10, Unkept(PAGE), checksums(np.zeros(PAGE, np.uint8))),
        ReadPiece((4 << 30) - 100, Padding(200)),
        ReadPiece(FAR - 50, Padding(50)),
        ReadPiece(
            FAR + 7, Strided(far.T.ctypes.data, 1, far.T.shape, far.T.strides, far), checksums(data[7:8007])
        ),
        ReadPiece(FAR + 2 * CHUNK_NBYTES, Consumed(5000, drain), checksums(data[2 * CHUNK_NBYTES :][:5000])),
    ]
    assert engine.read(sparse, pieces, tuning=Tuning(backend, 256 << 10, 4, 0)) == []
    assert np.array_equal(far.T.reshape(-1), data[7:8007])
    assert np.array_equal(drained, data[2 * CHUNK_NBYTES :][:5000])


def test_damage_beyond_four_gigabytes_is_found(backend: Backend, sparse: Path) -> None:
    data = random_bytes(3 * CHUNK_NBYTES, 4)
    with sparse.open("r+b") as file:
        file.seek(FAR + 2 * CHUNK_NBYTES + 17)
        file.write(bytes([data[2 * CHUNK_NBYTES + 17] ^ 1]))
    out = place(np.zeros(3 * CHUNK_NBYTES, np.uint8), 0)
    piece = ReadPiece(FAR, Memory(out.ctypes.data, out.nbytes, out), checksums(data))
    assert engine.read(sparse, [piece], tuning=Tuning(backend, 256 << 10, 4, 0)) == [Damage(0, 2)]
