"""Every system brings back what it saved, and has synced all it wrote before it says so."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.study import peers, results, states
from holdfast.study.limits import Fio, RawDevice, every_peer
from holdfast.study.peers import Peer

STORING = [peer for peer in every_peer() if peer.key not in (results.RAW, results.RAW_HUGE, results.FIO)]
IN_PYTHON = [peer for peer in STORING if not isinstance(peer, peers.Holdfast)]


def by_key(peer: Peer) -> str:
    return peer.key


def test_every_system_of_the_comparison_is_there_once() -> None:
    keys = [peer.key for peer in every_peer()]
    assert len(keys) == len(set(keys))
    assert set(keys) == {
        results.RAW,
        results.RAW_HUGE,
        results.FIO,
        results.HOLDFAST,
        results.RECYCLED,
        results.TORCH,
        results.TORCH_NO_CRC,
        results.SAFETENSORS,
        results.DCP,
        results.PICKLE,
        results.SAVEZ,
    }


def test_holdfast_is_measured_right_beside_the_limit_it_is_held_against() -> None:
    keys = [peer.key for peer in every_peer()]
    assert abs(keys.index(results.RAW) - keys.index(results.HOLDFAST)) == 1


@pytest.mark.parametrize("peer", STORING, ids=by_key)
@pytest.mark.parametrize("shape", states.SHAPES)
def test_loads_what_it_saved_bit_for_bit(peer: Peer, shape: states.Shape, tmp_path: Path) -> None:
    state = states.build(shape, 2 << 20, seed=3)
    first = next(iter(state.arrays.values()))
    first.reshape(-1).view(np.uint32)[0] = 0x7FC0_1234  # a NaN with a payload
    assert peer.missing() is None
    peer.start(tmp_path, state)
    try:
        for number in range(2):
            saved = peer.save(tmp_path / f"round-{number}", state)
            loaded = peer.load(saved).leaves
            assert loaded is not None
            assert peers.difference(state, loaded) is None
            addresses = {array.ctypes.data for array in state.arrays.values()}
            assert not any(np.asarray(leaf).ctypes.data in addresses for leaf in loaded.values())
            peer.remove(saved)
    finally:
        peer.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("peer", IN_PYTHON, ids=by_key)
def test_a_save_has_synced_every_file_and_directory_it_made(
    peer: Peer, tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def recording(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", recording)
    peer.start(tmp_path, tiny)
    saved = peer.save(tmp_path / "saved", tiny)
    made = [tmp_path, saved.path, *saved.path.rglob("*")]
    assert {path.stat().st_ino for path in made} <= synced


@pytest.mark.parametrize("fails", [False, True])
def test_torch_gets_its_crc_back_whatever_happens(
    fails: bool, tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during: list[bool] = []

    def save(*_: object) -> None:
        during.append(torch.serialization.get_crc32_options())
        (tmp_path / "x").touch()
        if fails:
            raise OSError("disk on fire")

    monkeypatch.setattr(torch, "save", save)
    assert torch.serialization.get_crc32_options()
    if fails:
        with pytest.raises(OSError, match="on fire"):
            peers.TorchSaveWithoutCrc().save(tmp_path / "x", tiny)
    else:
        peers.TorchSaveWithoutCrc().save(tmp_path / "x", tiny)
    assert during == [False]
    assert torch.serialization.get_crc32_options()


def test_pickle_is_protocol_5(tiny: states.State, tmp_path: Path) -> None:
    saved = peers.Pickle().save(tmp_path / "x", tiny)
    assert saved.path.read_bytes()[:2] == pickle.PROTO + bytes([5])


def test_raw_limit_writes_and_reads_as_much_as_the_state_has(tiny: states.State, tmp_path: Path) -> None:
    raw = RawDevice()
    saved = raw.save(tmp_path / "raw", tiny)
    assert 0 <= tiny.nbytes - saved.path.stat().st_size < 4096
    loaded = raw.load(saved)
    assert saved.seconds is not None
    assert loaded.seconds is not None
    assert min(saved.seconds, loaded.seconds) > 0
    assert loaded.leaves is None


def test_fio_that_is_not_there_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Fio().missing() == "apt install fio"


FAKE_FIO = """#!{python}
import json, sys
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if given["ioengine"] == {forbidden!r}:
    sys.exit("fio: Operation not permitted")
assert given["direct"] == "1"
size = int(given["size"])
if given["rw"] == "write":
    assert given["end_fsync"] == "1"
    open(given["filename"], "wb").truncate(size)
jobs = [{{"job_runtime": 500, "usr_cpu": 10.0, "sys_cpu": 30.0, given["rw"]: {{"io_bytes": size // 2}}}}]
print("fio: a remark before the document")
print(json.dumps({{"jobs": jobs}}))
"""


def fake_fio(directory: Path, monkeypatch: pytest.MonkeyPatch, *, forbidden: str) -> Fio:
    import sys

    program = directory / "bin" / "fio"
    program.parent.mkdir()
    program.write_text(FAKE_FIO.format(python=sys.executable, forbidden=forbidden))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return Fio()


def test_fio_is_read_by_its_own_clock_for_the_bytes_it_moved(
    tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio = fake_fio(tmp_path, monkeypatch, forbidden="")
    assert fio.missing() is None
    fio.start(tmp_path, tiny)
    for done in (fio.save(tmp_path / "f", tiny), fio.load(peers.Done(tmp_path / "f"))):
        assert done.seconds == pytest.approx(1.0, rel=1e-3)  # half the bytes took half a second
        assert done.cpu_seconds == pytest.approx(0.4, rel=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "f"]


def test_fio_falls_back_to_libaio_where_io_uring_is_forbidden(
    tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio = fake_fio(tmp_path, monkeypatch, forbidden="io_uring")
    fio.start(tmp_path, tiny)
    assert fio.save(tmp_path / "f", tiny).seconds is not None


def test_a_missing_package_is_named_with_how_to_get_it() -> None:
    assert peers.missing_modules("json", "no_such_package_1", "no_such_package_2") == (
        "pip install no_such_package_1 no_such_package_2"
    )
    assert peers.missing_modules("json") is None


class TestDifference:
    def test_equal_is_none(self, tiny: states.State) -> None:
        assert peers.difference(tiny, tiny.leaves) is None

    def test_one_flipped_bit_is_found_and_named(self, tiny: states.State) -> None:
        copy = {name: array.copy() for name, array in tiny.arrays.items()}
        last = list(copy)[-1]
        copy[last].reshape(-1).view(np.uint32)[-1] ^= 1
        said = peers.difference(tiny, copy)
        assert said is not None
        assert last in said

    def test_sign_of_zero_counts(self) -> None:
        saved = states.State("few-large", {"x": np.zeros(4, np.float32)}, None)
        assert peers.difference(saved, {"x": -np.zeros(4, np.float32)}) is not None

    def test_missing_and_made_up_leaves_are_named(self, tiny: states.State) -> None:
        rest = dict(tiny.arrays)
        gone = next(iter(rest))
        del rest[gone]
        assert gone in (peers.difference(tiny, rest) or "")
        assert "extra" in (peers.difference(tiny, {**tiny.arrays, "extra": np.zeros(1)}) or "")

    def test_another_shape_or_dtype_is_a_difference(self) -> None:
        saved = states.State("few-large", {"x": np.zeros((2, 2), np.float32)}, None)
        assert peers.difference(saved, {"x": np.zeros(4, np.float32)}) is not None
        assert peers.difference(saved, {"x": np.zeros((2, 2), np.int32)}) is not None
