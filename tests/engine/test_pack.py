"""Packing: every source copied to its place, zeros between, and the checksums of the copies."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from everystep.engine import CHUNK_NBYTES, Memory, Produced, Strided, WritePiece, pack


def in_memory(array: np.ndarray) -> Memory:  # type: ignore[type-arg]
    return Memory(array.ctypes.data, array.nbytes, array)


def digests(data: bytes) -> str:
    chunks = [data[at : at + CHUNK_NBYTES] for at in range(0, len(data), CHUNK_NBYTES)]
    return "".join(xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks)


def test_every_kind_of_source_is_copied_to_its_place_with_zeros_between() -> None:
    plain = np.arange(10, dtype=np.uint8)
    table = np.arange(12, dtype=np.uint16).reshape(3, 4)
    turned = Strided(table.ctypes.data, 2, (4, 3), (2, 8), table)

    def fill(window: memoryview, offset: int) -> None:
        window[:] = bytes(range(100 + offset, 100 + offset + len(window)))

    pieces = [
        WritePiece(0, in_memory(plain)),
        WritePiece(10, in_memory(np.empty(0, np.uint8))),
        WritePiece(16, turned),
        WritePiece(64, Produced(5, fill)),
    ]
    packed = pack(pieces, 128)
    parts = [plain.tobytes(), b"", table.T.tobytes(), bytes(range(100, 105))]
    assert packed.data == (
        parts[0] + bytes(6) + parts[2] + bytes(64 - 16 - len(parts[2])) + parts[3] + bytes(128 - 69)
    )
    assert packed.checksums() == [digests(part) for part in parts]


def test_large_pieces_have_a_checksum_per_chunk() -> None:
    array = np.random.default_rng(0).integers(0, 256, CHUNK_NBYTES * 2 + 17, dtype=np.uint8)
    packed = pack([WritePiece(64, in_memory(array))], array.nbytes + 64)
    assert packed.data == bytes(64) + array.tobytes()
    assert packed.checksums() == [digests(array.tobytes())]


def test_it_stands_for_a_job_that_is_over() -> None:
    packed = pack([WritePiece(0, in_memory(np.ones(8)))], 64)
    packed.wait(0.0)
    assert packed.done
    assert packed.wait_for_nbytes(10**9, 0.0)
    assert packed.progress == 64
    assert packed.stats() == (0, 64, 1)
    packed.cancel()
    packed.abandon()
    assert len(packed.data) == 64


def test_pieces_beyond_the_end_or_out_of_order_are_refused() -> None:
    piece = in_memory(np.ones(8))
    with pytest.raises(ValueError, match="past the end"):
        pack([WritePiece(1, piece)], 64)
    with pytest.raises(ValueError, match="overlap"):
        pack([WritePiece(8, piece), WritePiece(0, piece)], 128)


def test_what_a_source_raises_comes_through() -> None:
    def fill(window: memoryview, offset: int) -> None:
        raise KeyError("device gone")

    with pytest.raises(KeyError, match="device gone"):
        pack([WritePiece(0, Produced(5, fill))], 64)
