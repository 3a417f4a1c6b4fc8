"""Every system brings back what it saved, and has synced all it wrote before it says so."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from everystep_study import peers, states
from everystep_study.peers import base
from everystep_study.peers.base import Peer, difference

STORING = [peer() for key, peer in peers.STORING.items() if not key.startswith("raw")]
IN_PYTHON = [peer for peer in STORING if not isinstance(peer, peers.Everystep)]


def by_key(peer: Peer) -> str:
    return peer.key


def test_everystep_is_measured_right_beside_the_limit_it_is_held_against() -> None:
    keys = list(peers.STORING)
    assert abs(keys.index("raw") - keys.index("everystep")) == 1
    assert all(peer.key == key for key, peer in {**peers.STORING}.items())


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
            loaded = peer.load(saved.path).leaves
            assert loaded is not None
            assert difference(state.arrays, loaded) is None
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
    raw = peers.STORING["raw"]()
    saved = raw.save(tmp_path / "raw", tiny)
    assert 0 <= tiny.nbytes - saved.path.stat().st_size < 4096
    loaded = raw.load(saved.path)
    assert saved.seconds is not None
    assert loaded.seconds is not None
    assert min(saved.seconds, loaded.seconds) > 0
    assert loaded.leaves is None


def test_a_missing_package_is_named_with_how_to_get_it() -> None:
    assert base.missing_modules("json", "no_such_package_1", "no_such_package_2") == (
        "pip install no_such_package_1 no_such_package_2"
    )
    assert base.missing_modules("json") is None


class TestDifference:
    def test_equal_is_none(self, tiny: states.State) -> None:
        assert difference(tiny.arrays, tiny.leaves) is None

    def test_one_flipped_bit_is_found_and_named(self, tiny: states.State) -> None:
        copy = {name: array.copy() for name, array in tiny.arrays.items()}
        last = list(copy)[-1]
        copy[last].reshape(-1).view(np.uint32)[-1] ^= 1
        assert difference(tiny.arrays, copy) == f"{last} differs"

    def test_sign_shape_type_and_names_count(self) -> None:
        zero = {"x": np.zeros(4, np.float32)}
        assert difference(zero, {"x": -np.zeros(4, np.float32)}) == "x differs"
        assert "float64" in str(difference(zero, {"x": np.zeros(4)}))
        assert "(2, 2)" in str(difference(zero, {"x": torch.zeros(2, 2)}))
        assert "y" in str(difference(zero, {"y": zero["x"]}))
