"""Every mechanism brings back what it saved, and has synced all it wrote before it says so."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from everystep_study.harness import files
from everystep_study.mechanisms import states
from everystep_study.mechanisms.competitors import STORING
from everystep_study.mechanisms.mechanism import Mechanism
from everystep_study.mechanisms.plain import Pickle, RawDevice
from everystep_study.mechanisms.states import difference
from everystep_study.mechanisms.torch_mechanisms import TorchSaveWithoutCrc

SAVING = [key for key in STORING if not key.startswith("raw")]
IN_PYTHON = [key for key in SAVING if not STORING[key].ours]


def opened(kind: type[Mechanism], state: states.State, directory: Path) -> Mechanism:
    return kind(state, directory, durable=True, slots=1)


def test_everystep_is_measured_right_beside_the_limit_it_is_held_against() -> None:
    keys = list(STORING)
    assert abs(keys.index("raw") - keys.index("everystep")) == 1


@pytest.mark.parametrize("key", SAVING)
@pytest.mark.parametrize("shape", states.SHAPES)
def test_loads_what_it_saved_bit_for_bit(key: str, shape: states.Shape, tmp_path: Path) -> None:
    state = states.build(shape, 2 << 20, seed=3)
    first = next(iter(state.arrays.values()))
    first.reshape(-1).view(np.uint32)[0] = 0x7FC0_1234  # a NaN with a payload
    kind = STORING[key]
    assert kind.missing() is None
    kind.prepare()
    mechanism = opened(kind, state, tmp_path)
    try:
        for number in range(2):
            mechanism.directory = tmp_path / f"round-{number}"
            mechanism.directory.mkdir()
            state.loaded = None
            mechanism.save_and_sync()
            mechanism.load()
            assert state.loaded is not None
            assert difference(state.arrays, state.loaded) is None
            addresses = {array.ctypes.data for array in state.arrays.values()}
            assert not any(np.asarray(leaf).ctypes.data in addresses for leaf in state.loaded.values())
    finally:
        mechanism.close()


@pytest.mark.parametrize("key", ["everystep", "dcp"])
def test_on_ranks_a_load_fills_the_arrays(key: str, tmp_path: Path) -> None:
    state = states.build("gpt2", 2 << 20)
    state.in_place = True
    before = {name: array.copy() for name, array in state.arrays.items()}
    mechanism = opened(STORING[key], state, tmp_path)
    mechanism.save_and_sync()
    for array in state.arrays.values():
        array[...] = 0
    mechanism.load()
    assert difference(before, state.arrays) is None


@pytest.mark.parametrize("key", IN_PYTHON)
def test_a_save_has_synced_every_file_and_directory_it_made(
    key: str, tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def recording(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", recording)
    mechanism = opened(STORING[key], tiny, tmp_path)
    mechanism.save_and_sync()
    made = [tmp_path, mechanism.path, *mechanism.path.rglob("*")]
    assert {path.stat().st_ino for path in made} <= synced


@pytest.mark.parametrize("fails", [False, True])
def test_torch_gets_its_crc_back_whatever_happens(
    fails: bool, tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during: list[bool] = []

    def save(*_: object, **options: object) -> None:
        during.append(torch.serialization.get_crc32_options())
        if fails:
            raise OSError("disk on fire")

    monkeypatch.setattr(torch, "save", save)
    assert torch.serialization.get_crc32_options()
    mechanism = opened(TorchSaveWithoutCrc, tiny, tmp_path)
    if fails:
        with pytest.raises(OSError, match="on fire"):
            mechanism.save()
    else:
        mechanism.save()
    assert during == [False]
    assert torch.serialization.get_crc32_options()


def test_pickle_is_protocol_5(tiny: states.State, tmp_path: Path) -> None:
    mechanism = opened(Pickle, tiny, tmp_path)
    mechanism.save()
    assert mechanism.path.read_bytes()[:2] == pickle.PROTO + bytes([5])


def test_raw_limit_writes_and_reads_as_much_as_the_state_has(tiny: states.State, tmp_path: Path) -> None:
    raw = opened(RawDevice, tiny, tmp_path)
    for call in (raw.save_and_sync, raw.load):
        raw.own_seconds = None
        call()
        assert raw.own_seconds is not None
        assert raw.own_seconds > 0
    assert 0 <= tiny.nbytes - raw.path.stat().st_size < 4096


def test_a_missing_package_is_named_with_how_to_get_it() -> None:
    assert files.missing_modules("json", "no_such_package_1", "no_such_package_2") == (
        "pip install no_such_package_1 no_such_package_2"
    )
    assert files.missing_modules("json") is None


class TestDifference:
    def test_equal_is_none(self, tiny: states.State) -> None:
        assert difference(tiny.arrays, tiny.tree()) is None

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
