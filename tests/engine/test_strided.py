"""Strided memory: its C-order bytes leave and arrive exactly, whatever the strides. numpy is the model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everystep import engine
from everystep.engine import Memory, ReadPiece, Strided, Tuning, WritePiece
from support.states.random_pieces import PAGE, Bytes, checksums, random_bytes

numbers = itertools.count()
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
itemsizes = st.integers(1, 16) | st.sampled_from([17, 24, 31, 100])


@st.composite
def views(draw: st.DrawFn, *, writable: bool) -> Any:
    """A view of random memory: sliced with any step, transposed, reversed, and (to be read only) expanded."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    itemsize = draw(itemsizes)
    base = np.frombuffer(
        bytearray(
            random_bytes(itemsize * int(np.prod(shape, dtype=int)), draw(st.integers(0, 99))).tobytes()
        ),
        np.dtype((np.void, itemsize)),
    ).reshape(shape)
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    view = base[(*(slice(None, None, step) for step in steps), ...)]
    view = view.transpose(draw(st.permutations(range(view.ndim))))
    if not writable and draw(st.booleans()):
        # A stride of zero, and one of an arbitrary meaningless value where there is one element only.
        view = np.broadcast_to(view, (draw(st.integers(1, 5)), *view.shape))
    if draw(st.booleans()):
        view = view[..., None]
    return view


def strided(view: Any) -> Strided:
    return Strided(view.ctypes.data, view.itemsize, view.shape, view.strides, view)


def bytes_of(view: Any) -> Bytes:
    return np.frombuffer(np.ascontiguousarray(view).tobytes(), np.uint8)


@settings(shared_folder, max_examples=80)
@given(view=views(writable=False), offset=st.integers(0, 2 * PAGE))
def test_gathering_equals_numpy(folder: Path, view: Any, offset: int) -> None:
    """Windows of one page cut items and rows anywhere."""
    path = folder / f"gather{next(numbers)}"
    nbytes = -(-(offset + view.nbytes) // PAGE) * PAGE
    pieces = [WritePiece(offset, strided(view))]
    job = engine.write(path, nbytes, pieces, tuning=Tuning("buffered", PAGE, 2, 0), background=False)
    job.wait()
    expected = np.zeros(nbytes, np.uint8)
    expected[offset : offset + view.nbytes] = bytes_of(view)
    assert np.array_equal(np.fromfile(path, np.uint8), expected)
    assert job.checksums() == [checksums(bytes_of(view))]
    path.unlink()


@settings(shared_folder, max_examples=80)
@given(view=views(writable=True), offset=st.integers(0, 2 * PAGE), seed=st.integers(0, 99))
def test_scattering_equals_numpy_and_touches_nothing_else(
    folder: Path, view: Any, offset: int, seed: int
) -> None:
    path = folder / f"scatter{next(numbers)}"
    data = random_bytes(offset + view.nbytes, seed)
    data.tofile(path)
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    before = base.copy()
    piece = ReadPiece(offset, strided(view), checksums(data[offset:], 777))
    found = engine.read(path, [piece], tuning=Tuning("buffered", PAGE, 2, 0), chunk_nbytes=777)
    assert found == []
    after = base.tobytes()
    base[...] = before
    view[...] = np.frombuffer(data[offset:].tobytes(), view.dtype).reshape(view.shape)
    assert base.tobytes() == after
    path.unlink()


def test_a_stride_larger_than_two_gigabytes(tmp_path: Path) -> None:
    """Address arithmetic in 64 bits. The memory in between is reserved, never touched."""
    span = 5 << 30
    base = np.zeros(span + PAGE, np.uint8)  # the kernel gives pages only to what is written
    base[0], base[span] = 1, 2
    there = Strided(base.ctypes.data, 1, (2,), (span,), base)
    back = Strided(base.ctypes.data + span, 1, (2,), (-span,), base)
    pieces = [WritePiece(0, there), WritePiece(2, back)]
    engine.write(tmp_path / "f", 4, pieces, tuning=Tuning("buffered")).wait()
    assert (tmp_path / "f").read_bytes() == bytes([1, 2, 2, 1])
    (tmp_path / "f").write_bytes(bytes([3, 4]))
    engine.read(tmp_path / "f", [ReadPiece(0, there)], tuning=Tuning("buffered"), verify=False)
    assert (base[0], base[span]) == (3, 4)


@pytest.mark.parametrize(
    "bad",
    [Strided(0, 0, (2,), (1,), None), Strided(0, -1, (2,), (1,), None), Strided(0, 1, (2,), (1, 1), None)],
)
def test_descriptions_that_make_no_sense_are_refused(tmp_path: Path, bad: Strided) -> None:
    with pytest.raises((ValueError, TypeError)):
        engine.write(tmp_path / "f", PAGE, [WritePiece(0, bad)], tuning=Tuning("buffered"))
    assert list(tmp_path.iterdir()) == []


def test_contiguous_memory_described_with_strides_is_the_same_bytes(tmp_path: Path) -> None:
    data = random_bytes(6 * 7 * 8, 0)
    ways = [
        Strided(data.ctypes.data, 8, (6, 7), (56, 8), data),
        Strided(data.ctypes.data, 1, (6, 7, 8), (56, 8, 1), data),
        Strided(data.ctypes.data, 336, (), (), data),
        Strided(data.ctypes.data, 8, (1, 42, 1), (12345, 8, -999), data),
        Memory(data.ctypes.data, 336, data),
    ]
    pieces = [WritePiece(336 * n, way) for n, way in enumerate(ways)]
    job = engine.write(tmp_path / "f", PAGE, pieces, tuning=Tuning("buffered"))
    job.wait()
    assert job.checksums() == [checksums(data)] * len(ways)
