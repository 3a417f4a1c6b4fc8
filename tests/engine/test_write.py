"""What every backend promises about writing: the file is exactly what the pieces describe."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everystep import engine
from everystep.engine import CHUNK_NBYTES, Backend, Memory, Produced, Tuning, WritePiece, fs
from support.states.random_pieces import (
    PAGE,
    Bytes,
    Spec,
    Windows,
    checksums,
    fitted,
    in_pages,
    make_source,
    memory_of,
    offsets_of,
    place,
    random_bytes,
    small_windows,
    specs,
)

numbers = itertools.count()
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def described(pieces: list[Spec], tail: int, seed: int) -> tuple[list[WritePiece], Bytes, list[Bytes]]:
    """The pieces with memory behind them, the whole file they describe, and each piece's bytes."""
    pieces = [fitted(spec) for spec in pieces]
    offsets = offsets_of(pieces)
    end = offsets[-1] + pieces[-1].nbytes if pieces else 0
    whole = np.zeros(-(-(end + tail) // PAGE) * PAGE, np.uint8)
    parts = []
    for number, (spec, offset) in enumerate(zip(pieces, offsets, strict=True)):
        parts.append(random_bytes(spec.nbytes, seed + number))
        whole[offset : offset + spec.nbytes] = parts[-1]
    made = [
        WritePiece(offset, make_source(spec, offset, part))
        for spec, offset, part in zip(pieces, offsets, parts, strict=True)
    ]
    return made, whole, parts


def written(path: Path) -> Bytes:
    return np.fromfile(path, np.uint8)


@settings(shared_folder, max_examples=100)
@given(
    pieces=st.lists(specs("memory", "strided", "callback"), max_size=8),
    tail=st.sampled_from([0, 1, 5000, 130_000]),
    depth=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)
def test_any_pieces_are_written_exactly_as_described(
    backend: Backend, folder: Path, pieces: list[Spec], tail: int, depth: int, seed: int
) -> None:
    made, whole, parts = described(pieces, tail, seed)
    path = folder / f"any{next(numbers)}"
    job = engine.write(path, whole.nbytes, made, tuning=small_windows(backend, depth=depth))
    job.wait()
    assert np.array_equal(written(path), whole)
    assert job.checksums() == [checksums(part) for part in parts]
    assert job.progress == whole.nbytes
    assert job.done
    # The small path (one copy, one write through the page cache) makes the same file.
    job = engine.write(folder / "small", whole.nbytes, made, tuning=Tuning(backend, small_nbytes=1 << 40))
    job.wait()
    assert np.array_equal(written(folder / "small"), whole)
    assert job.checksums() == [checksums(part) for part in parts]
    path.unlink()
    (folder / "small").unlink()


@settings(shared_folder, max_examples=40)
@given(before=st.integers(0, 400_000), after=st.integers(0, 100), small=st.booleans())
def test_recycling_overwrites_in_place_and_leaves_nothing_of_the_old_file(
    backend: Backend, folder: Path, before: int, after: int, small: bool
) -> None:
    path = folder / f"old{next(numbers)}"
    path.write_bytes(b"\xff" * before)
    inode = path.stat().st_ino
    nbytes = after * PAGE
    data = random_bytes(nbytes // 2, after)
    pieces = [WritePiece(nbytes // 4, memory_of(data))]
    tuning = small_windows(backend, small_nbytes=1 << 20 if small else 0)
    job = engine.write(path, nbytes, pieces, tuning=tuning, recycle=True)
    job.wait()
    fs.sync([job])
    expected = np.zeros(nbytes, np.uint8)
    expected[nbytes // 4 : nbytes // 4 + data.nbytes] = data
    assert np.array_equal(written(path), expected)
    assert path.stat().st_ino == inode
    path.unlink()


@pytest.mark.parametrize("small_nbytes", [0, 1 << 20])
def test_an_existing_file_is_never_touched_unless_it_is_recycled(
    backend: Backend, tmp_path: Path, small_nbytes: int
) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"precious")
    job = engine.write(path, PAGE, [], tuning=small_windows(backend, small_nbytes=small_nbytes))
    with pytest.raises(FileExistsError) as caught:
        job.wait()
    assert caught.value.filename == os.fspath(path)
    assert path.read_bytes() == b"precious"


def test_recycling_makes_the_file_when_there_is_none(backend: Backend, tmp_path: Path) -> None:
    engine.write(tmp_path / "new", PAGE, [], tuning=small_windows(backend), recycle=True).wait()
    assert (tmp_path / "new").read_bytes() == bytes(PAGE)


@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "small pages"])
@pytest.mark.parametrize("residue", [0, 7], ids=["congruent", "shifted"])
def test_large_pieces_are_staged_whatever_memory_they_lie_in(
    backend: Backend, tmp_path: Path, huge: bool, residue: int
) -> None:
    offsets = [PAGE + 40, 6 * CHUNK_NBYTES + 512, 14 * CHUNK_NBYTES]
    arrays = [
        in_pages(random_bytes(5 * CHUNK_NBYTES + n, n), offset % PAGE + residue, huge=huge)
        for n, offset in enumerate(offsets)
    ]
    pieces = [WritePiece(o, memory_of(a)) for o, a in zip(offsets, arrays, strict=True)]
    job = engine.write(
        tmp_path / "large", 20 * CHUNK_NBYTES, pieces, tuning=Tuning(backend, 4 * CHUNK_NBYTES)
    )
    job.wait()
    direct, staged, transfers = job.stats()
    assert (direct, staged) == (0, 20 * CHUNK_NBYTES)
    if backend != "buffered":
        assert transfers == 8  # of 0.5, 1, 2, 4, 4, 4, 4 and 0.5 chunks: the device begins early
    assert job.checksums() == [checksums(array) for array in arrays]
    whole = written(tmp_path / "large")
    for offset, array in zip(offsets, arrays, strict=True):
        assert np.array_equal(whole[offset : offset + array.nbytes], array)


@pytest.mark.parametrize(
    ("window", "depth"), [(17 << 20, 4), (66 << 20, 1), (33 << 20, 2), (9_900_032, 7), (1 << 20, 70)]
)
def test_windows_in_memory_that_is_still_being_got(
    backend: Backend, tmp_path: Path, window: int, depth: int
) -> None:
    """More staging than a process keeps is new in every job: windows move and grow while it is touched."""
    data = in_pages(random_bytes((80 << 20) + 77, 1), 0, huge=False)
    path = tmp_path / "large"
    piece = WritePiece(PAGE + 7, memory_of(data))
    job = engine.write(
        path, data.nbytes // PAGE * PAGE + 3 * PAGE, [piece], tuning=Tuning(backend, window, depth)
    )
    job.wait()
    assert job.checksums() == [checksums(data)]
    assert np.array_equal(written(path)[piece.offset :][: data.nbytes], data)
    path.unlink()


@pytest.mark.parametrize("small_nbytes", [0, 1 << 40])
def test_many_middling_pieces_with_gaps_in_one_window(
    backend: Backend, tmp_path: Path, small_nbytes: int
) -> None:
    stride, nbytes, count = 40_960, 36_864, 1300
    base = place(random_bytes(stride * count, 3), 0)
    pieces = [
        WritePiece(n * stride, Memory(base.ctypes.data + n * stride, nbytes, base)) for n in range(count)
    ]
    tuning = Tuning(backend, window_nbytes=64 << 20, depth=1, small_nbytes=small_nbytes)
    engine.write(tmp_path / "many", stride * count, pieces, tuning=tuning).wait()
    expected = base.reshape(count, stride).copy()
    expected[:, nbytes:] = 0
    assert np.array_equal(written(tmp_path / "many"), expected.reshape(-1))


def test_a_producer_is_asked_for_every_byte_once_and_in_order(backend: Backend, tmp_path: Path) -> None:
    windows = Windows(random_bytes(900_001, 5))
    pieces = [WritePiece(123, Produced(900_001, windows.fill))]
    engine.write(tmp_path / "p", 1 << 20, pieces, tuning=small_windows(backend)).wait()
    assert windows.covered_once()
    assert len(windows.seen) == 14  # windows of 64 KiB: never more at once than the engine's own memory
    assert max(nbytes for _, nbytes in windows.seen) <= 64 << 10


def test_an_empty_file_and_pieces_of_no_bytes(backend: Backend, tmp_path: Path) -> None:
    job = engine.write(tmp_path / "empty", 0, [], tuning=small_windows(backend))
    job.wait()
    assert (tmp_path / "empty").stat().st_size == 0
    assert job.checksums() == []
    nothing = np.empty(0, np.uint8)
    pieces = [WritePiece(n, memory_of(nothing)) for n in (0, 0, PAGE)]
    job = engine.write(tmp_path / "zeros", PAGE, pieces, tuning=small_windows(backend))
    job.wait()
    assert (tmp_path / "zeros").read_bytes() == bytes(PAGE)
    assert job.checksums() == ["", "", ""]


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 40 * PAGE + 3])
@pytest.mark.parametrize("small_nbytes", [0, 1 << 20])
def test_a_header_comes_first_and_has_no_checksum(
    backend: Backend, tmp_path: Path, nbytes: int, small_nbytes: int
) -> None:
    header, data = random_bytes(nbytes, 1).tobytes(), random_bytes(60 * PAGE, 2)
    total = -(-(nbytes + data.nbytes) // PAGE) * PAGE
    job = engine.write(
        tmp_path / "f",
        total,
        [WritePiece(nbytes, memory_of(data))],
        tuning=small_windows(backend, small_nbytes=small_nbytes),
        header=header,
    )
    job.wait()
    assert (tmp_path / "f").read_bytes() == (header + data.tobytes()).ljust(total, b"\0")
    assert job.checksums() == [checksums(data)]


def test_a_piece_inside_the_header_is_refused(backend: Backend, tmp_path: Path) -> None:
    pieces = [WritePiece(10, memory_of(random_bytes(100, 0)))]
    with pytest.raises(ValueError, match="pieces"):
        engine.write(tmp_path / "f", PAGE, pieces, tuning=small_windows(backend), header=b"x" * 11)


def test_writing_in_the_foreground_is_done_on_return(backend: Backend, tmp_path: Path) -> None:
    data = random_bytes(PAGE * 40, 0)
    job = engine.write(
        tmp_path / "f",
        data.nbytes,
        [WritePiece(0, memory_of(data))],
        tuning=small_windows(backend),
        background=False,
    )
    assert job.done
    assert np.array_equal(written(tmp_path / "f"), data)


@pytest.mark.parametrize(
    ("offsets", "nbytes"),
    [((0, 50), 2 * PAGE), ((50, 0), 2 * PAGE), ((0, 2 * PAGE - 99), 2 * PAGE), ((2**64 - 50,), 2 * PAGE)],
    ids=["overlap", "out of order", "past the end", "overflow"],
)
def test_descriptions_that_make_no_sense_are_refused_before_anything_is_written(
    backend: Backend, tmp_path: Path, offsets: tuple[int, ...], nbytes: int
) -> None:
    data = random_bytes(100, 0)
    with pytest.raises(ValueError, match="pieces"):
        engine.write(
            tmp_path / "f",
            nbytes,
            [WritePiece(offset, memory_of(data)) for offset in offsets],
            tuning=small_windows(backend),
        )
    assert list(tmp_path.iterdir()) == []


def test_direct_io_refuses_a_size_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of the alignment"):
        engine.write(tmp_path / "f", PAGE + 1, [], tuning=small_windows("threads"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("window", "depth"),
    [
        (1000, 8),
        (0, 8),
        (-PAGE, 8),
        (PAGE, 0),
        (PAGE, 257),
        (1 << 63, 2),
        (1 << 62, 4),
        ((1 << 30) + PAGE, 1),
    ],
)
def test_tuning_beyond_its_limits_is_refused(tmp_path: Path, window: int, depth: int) -> None:
    with pytest.raises(ValueError, match="tuning"):
        Tuning("buffered", window, depth)
    native = importlib.import_module("everystep._native")
    # The native side checks what it is given; a number that it cannot even hold is another error.
    pieces = native.Pieces()
    pieces.memory(PAGE, PAGE, 0)
    with pytest.raises((ValueError, TypeError), match=r"tuning|incompatible"):
        native.read(tmp_path / "f", pieces, False, "threads", window, depth, CHUNK_NBYTES, 0, False)
    with pytest.raises((ValueError, TypeError), match=r"tuning|incompatible"):
        native.write(
            tmp_path / "f", 2 * PAGE, False, b"", pieces, "threads", window, depth, CHUNK_NBYTES, 0, False
        )
    assert list(tmp_path.iterdir()) == []
