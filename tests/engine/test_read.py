"""What every backend promises about reading: the bytes asked for, where asked, and no silent damage."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everystep import engine
from everystep.engine import (
    CHUNK_NBYTES,
    Backend,
    Consumed,
    Damage,
    Memory,
    Padding,
    ReadPiece,
    Tuning,
    Unkept,
)
from support.states.random_pieces import (
    PAGE,
    Bytes,
    Spec,
    Target,
    Windows,
    checksums,
    fitted,
    in_pages,
    make_target,
    memory_of,
    offsets_of,
    place,
    random_bytes,
    small_windows,
    specs,
)

numbers = itertools.count()
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
ALL = ("memory", "strided", "callback", "unkept", "padding")
chunk_sizes = st.sampled_from([4096, 10_000, CHUNK_NBYTES])


def file_of(path: Path, pieces: list[Spec], tail: int, seed: int) -> tuple[list[Spec], list[int], Bytes]:
    """A file in which the pieces' bytes are random, but padding is zero."""
    pieces = [fitted(spec) for spec in pieces]
    offsets = offsets_of(pieces)
    end = offsets[-1] + pieces[-1].nbytes if pieces else 0
    whole = random_bytes(end + tail, seed)
    for spec, offset in zip(pieces, offsets, strict=True):
        if spec.kind == "padding":
            whole[offset : offset + spec.nbytes] = 0
    whole.tofile(path)
    return pieces, offsets, whole


def asked(
    pieces: Sequence[Spec], offsets: Sequence[int], whole: Bytes, chunk_nbytes: int
) -> tuple[list[ReadPiece], list[Target]]:
    targets = [make_target(spec, offset) for spec, offset in zip(pieces, offsets, strict=True)]
    made = [
        ReadPiece(offset, target.destination, checksums(whole[offset : offset + spec.nbytes], chunk_nbytes))
        for spec, offset, target in zip(pieces, offsets, targets, strict=True)
    ]
    return made, targets


@settings(shared_folder, max_examples=100)
@given(
    pieces=st.lists(specs(*ALL), max_size=8),
    chosen=st.lists(st.booleans(), min_size=8, max_size=8),
    tail=st.sampled_from([0, 1, 4096, 130_000]),
    chunk_nbytes=chunk_sizes,
    verify=st.booleans(),
    depth=st.integers(1, 4),
    small=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_subset_of_pieces_arrives_exactly(
    backend: Backend,
    folder: Path,
    pieces: list[Spec],
    chosen: list[bool],
    tail: int,
    chunk_nbytes: int,
    verify: bool,
    depth: int,
    small: bool,
    seed: int,
) -> None:
    path = folder / f"read{next(numbers)}"
    pieces, offsets, whole = file_of(path, pieces, tail, seed)
    wanted = [n for n in range(len(pieces)) if chosen[n]]
    made, targets = asked([pieces[n] for n in wanted], [offsets[n] for n in wanted], whole, chunk_nbytes)
    tuning = small_windows(backend, depth=depth, small_nbytes=1 << 20 if small else 0)
    damage = engine.read(path, made, tuning=tuning, chunk_nbytes=chunk_nbytes, verify=verify)
    assert damage == []
    for number, target in zip(wanted, targets, strict=True):
        spec, offset = pieces[number], offsets[number]
        if target.array is not None:
            assert np.array_equal(target.arrived(), whole[offset : offset + spec.nbytes])
    path.unlink()


@settings(shared_folder, max_examples=70)
@given(
    pieces=st.lists(specs(*ALL), min_size=1, max_size=6).filter(
        lambda found: any(s.nbytes >= 16 for s in found)
    ),
    chunk_nbytes=chunk_sizes,
    data=st.data(),
)
def test_damage_is_reported_for_exactly_the_piece_and_chunk_it_is_in(
    backend: Backend, folder: Path, pieces: list[Spec], chunk_nbytes: int, data: st.DataObject
) -> None:
    path = folder / f"damaged{next(numbers)}"
    pieces, offsets, whole = file_of(path, pieces, 0, 7)
    made, _ = asked(pieces, offsets, whole, chunk_nbytes)
    hurt = data.draw(
        st.sets(
            st.sampled_from([n for n, spec in enumerate(pieces) if spec.nbytes]).flatmap(
                lambda n: st.tuples(st.just(n), st.integers(0, pieces[n].nbytes - 1))
            ),
            min_size=1,
            max_size=4,
        )
    )
    broken = whole.copy()
    for number, inside in hurt:
        broken[offsets[number] + inside] ^= 0x10
    broken.tofile(path)
    found = engine.read(path, made, tuning=small_windows(backend), chunk_nbytes=chunk_nbytes)
    chunked = [
        spec.kind != "padding" for spec in pieces
    ]  # padding has no checksums, so only the piece is told
    assert {(d.piece, d.chunk if chunked[d.piece] else None) for d in found} == {
        (number, inside // chunk_nbytes if chunked[number] else None) for number, inside in hurt
    }
    path.unlink()


@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "small pages"])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("residue", [0, 64, 7])
def test_large_memory_is_filled_exactly_and_damage_is_found_wherever_it_lies(
    backend: Backend, tmp_path: Path, huge: bool, verify: bool, residue: int
) -> None:
    """Into small pages the way leads through staging, with a check of each chunk while it is copied."""
    offset, window = PAGE + residue, 3 * CHUNK_NBYTES
    data = random_bytes(20 * CHUNK_NBYTES + 100, 5)
    whole = np.zeros(offset + data.nbytes + PAGE - (offset + data.nbytes) % PAGE, np.uint8)
    whole[offset : offset + data.nbytes] = data
    expected = checksums(data)
    # At both ends of a chunk, in one that lies in two windows, in the last.
    places = [0, CHUNK_NBYTES - 1, CHUNK_NBYTES, window - offset + 5, data.nbytes - 1]
    for spot in places:
        whole[offset + spot] ^= 1
    whole.tofile(tmp_path / "f")
    room = in_pages(np.full(data.nbytes + 2 * PAGE, 0xEE, np.uint8), residue, huge=huge)
    target = room[PAGE : PAGE + data.nbytes]
    piece = ReadPiece(offset, memory_of(target), expected)
    damage = engine.read(tmp_path / "f", [piece], tuning=Tuning(backend, window, 3), verify=verify)
    found = sorted({spot // CHUNK_NBYTES for spot in places})
    assert [item.chunk for item in damage] == (found if verify else [])
    assert np.array_equal(target, whole[offset : offset + data.nbytes])
    assert set(room[:PAGE]) | set(room[PAGE + data.nbytes :]) == {0xEE}


@pytest.mark.parametrize(("window", "depth"), [(4 << 20, 11), (3_997_696, 12), (1 << 20, 50)])
def test_windows_in_memory_that_is_still_being_got(
    backend: Backend, tmp_path: Path, window: int, depth: int
) -> None:
    """More staging than a process keeps is new in every job: windows move and grow while it is touched."""
    data = random_bytes((90 << 20) + PAGE, 2)
    data.tofile(tmp_path / "f")
    target = in_pages(np.zeros_like(data), 7, huge=False)
    piece = ReadPiece(0, memory_of(target), checksums(data))
    assert engine.read(tmp_path / "f", [piece], tuning=Tuning(backend, window, depth)) == []
    assert np.array_equal(target, data)


def test_without_verification_checksums_are_not_even_looked_at(backend: Backend, tmp_path: Path) -> None:
    data = random_bytes(PAGE * 20, 1)
    data.tofile(tmp_path / "f")
    out = np.zeros_like(data)
    piece = ReadPiece(0, memory_of(out), "0" * 16)
    assert engine.read(tmp_path / "f", [piece], tuning=small_windows(backend)) == [Damage(0, 0)]
    assert engine.read(tmp_path / "f", [piece], tuning=small_windows(backend), verify=False) == []
    assert np.array_equal(out, data)


def test_a_destination_keeps_its_neighbours(backend: Backend, tmp_path: Path) -> None:
    """Whole blocks come off the device, but nothing beside the piece may change."""
    data = random_bytes(40 * PAGE, 1)
    data.tofile(tmp_path / "f")
    base = place(np.full(41 * PAGE, 0xAA, np.uint8), 0)
    offset, nbytes = 100, 38 * PAGE + 77
    target = Memory(base.ctypes.data + offset, nbytes, base)
    engine.read(tmp_path / "f", [ReadPiece(offset, target)], tuning=small_windows(backend), verify=False)
    assert np.array_equal(base[offset : offset + nbytes], data[offset : offset + nbytes])
    assert (base[:offset] == 0xAA).all()
    assert (base[offset + nbytes :] == 0xAA).all()


def test_a_consumer_gets_every_byte_once_and_in_order(backend: Backend, tmp_path: Path) -> None:
    random_bytes(1 << 20, 3).tofile(tmp_path / "f")
    windows = Windows(np.zeros(900_001, np.uint8))
    piece = ReadPiece(123, Consumed(900_001, windows.drain))
    engine.read(tmp_path / "f", [piece], tuning=small_windows(backend), verify=False)
    assert windows.covered_once()
    assert np.array_equal(windows.data, np.fromfile(tmp_path / "f", np.uint8)[123 : 123 + 900_001])


def test_a_file_of_any_length_can_be_read_to_its_end(backend: Backend, tmp_path: Path) -> None:
    """Direct reads want whole blocks; a file of another program need not have them."""
    data = random_bytes(3 * CHUNK_NBYTES + 1234, 3)
    data.tofile(tmp_path / "f")
    out = np.zeros_like(data)
    piece = ReadPiece(0, memory_of(out), checksums(data))
    assert engine.read(tmp_path / "f", [piece], tuning=Tuning(backend, small_nbytes=0)) == []
    assert np.array_equal(out, data)


@pytest.mark.parametrize("padding", [PAGE * 21, 1 << 45, 1 << 62])
def test_padding_past_the_end_is_that_error_and_takes_no_memory(
    backend: Backend, tmp_path: Path, padding: int
) -> None:
    """Whatever size a manifest claims: the file's is looked at first."""
    random_bytes(PAGE * 20, 3).tofile(tmp_path / "f")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OSError, match="No data"):
        engine.read(tmp_path / "f", [ReadPiece(0, Padding(padding))], tuning=small_windows(backend))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_reading_past_the_end_is_an_error_that_names_the_file(backend: Backend, tmp_path: Path) -> None:
    random_bytes(PAGE * 20, 3).tofile(tmp_path / "f")
    piece = ReadPiece(PAGE, Unkept(PAGE * 20))
    with pytest.raises(OSError, match="No data") as caught:
        engine.read(tmp_path / "f", [piece], tuning=small_windows(backend), verify=False)
    assert caught.value.errno == errno.ENODATA
    assert caught.value.filename == os.fspath(tmp_path / "f")


def test_progress_is_reported_and_ends_at_everything(backend: Backend, tmp_path: Path) -> None:
    data = random_bytes(64 * PAGE, 3)
    data.tofile(tmp_path / "f")
    told: list[int] = []
    # A consumer that takes its time makes the reader wait, so that progress is told at least once.
    windows = Windows(np.zeros(data.nbytes, np.uint8))

    def drain(window: memoryview, offset: int) -> None:
        while not told:
            os.sched_yield()
        windows.drain(window, offset)

    engine.read(
        tmp_path / "f",
        [ReadPiece(0, Consumed(data.nbytes, drain))],
        tuning=small_windows(backend),
        verify=False,
        progress=told.append,
    )
    assert told[0] == 0
    assert np.array_equal(windows.data, data)


def test_more_damage_than_anybody_reads_about_is_cut_off(backend: Backend, tmp_path: Path) -> None:
    np.zeros(5000 * 64, np.uint8).tofile(tmp_path / "f")
    piece = ReadPiece(0, Unkept(5000 * 64), "0" * 16 * 5000)
    found = engine.read(tmp_path / "f", [piece], tuning=small_windows(backend), chunk_nbytes=64)
    assert found == [Damage(0, n) for n in range(4096)]


@pytest.mark.parametrize("text", ["0" * 15, "0" * 32, "g" * 16, "A" * 16, ""])
def test_checksums_of_the_wrong_form_are_refused(backend: Backend, tmp_path: Path, text: str) -> None:
    np.zeros(PAGE, np.uint8).tofile(tmp_path / "f")
    with pytest.raises(ValueError, match="checksum"):
        engine.read(tmp_path / "f", [ReadPiece(0, Unkept(PAGE), text)], tuning=small_windows(backend))


def test_padding_that_is_not_zero_is_damage_without_any_checksum(backend: Backend, tmp_path: Path) -> None:
    data = np.zeros(100 * PAGE, np.uint8)
    data[70 * PAGE] = 1
    data.tofile(tmp_path / "f")
    pieces = [ReadPiece(0, Padding(60 * PAGE)), ReadPiece(60 * PAGE, Padding(40 * PAGE))]
    assert {d.piece for d in engine.read(tmp_path / "f", pieces, tuning=small_windows(backend))} == {1}
