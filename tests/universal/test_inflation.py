"""What would become far more than is in the files: refused by every reader, unless it is allowed."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import everystep
from everystep import inspect, universal
from everystep.errors import CorruptCheckpoint, DecompressionBomb
from everystep.universal import inflation
from support.processes.command import command

REAL_NBYTES = inflation.ALWAYS_NBYTES
LOW_NBYTES = 4 << 20
"""What is never refused in these tests: the rule is the same, and it takes less to make bombs."""
NBYTES = LOW_NBYTES // 4
COUNT = 5
"""Arrays, of which each alone is allowed."""
ANY = everystep.Options(max_inflation=math.inf)


def npz(path: Path) -> None:
    np.savez_compressed(path, **{f"w{number}": np.zeros(NBYTES, np.uint8) for number in range(COUNT)})


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for number in range(COUNT):
            zeros = np.zeros(NBYTES, np.uint8)
            file.create_dataset(f"w{number}", data=zeros, chunks=(1 << 20,), compression="gzip")


def hdf5_of_fill_values(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for number in range(COUNT):
            file.create_dataset(f"w{number}", (REAL_NBYTES // 4,), np.uint8, chunks=(1 << 20,))


def overlapping_views(path: Path) -> None:
    storage = torch.zeros(1 << 20, dtype=torch.uint8)
    torch.save({f"w{number}": storage[number:] for number in range(300)}, path)


def overlapping_negative_views(path: Path) -> None:
    storage = torch.zeros(1 << 18)
    torch.save({f"w{number}": torch._neg_view(storage[number:]) for number in range(300)}, path)


BOMBS: dict[str, Callable[[Path], Any]] = {
    "a.npz": npz,
    "a.h5": hdf5,
    "b.h5": hdf5_of_fill_values,
    "a.pt": overlapping_views,
    "b.pt": overlapping_negative_views,
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: no test changes it."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, write in BOMBS.items():
        write(folder / name)
    return folder


@pytest.fixture(autouse=True)
def _low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflation, "ALWAYS_NBYTES", LOW_NBYTES)


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, _: everystep.load(path),
    "open": lambda path, _: everystep.open(path),
    "verify": lambda path, _: everystep.verify(path),
    "describe": lambda path, _: inspect.describe(path),
    "export": lambda path, out: inspect.export(path, out / "x.safetensors"),
    "compare": lambda path, _: inspect.compare(path, path),
    "convert": lambda path, out: universal.convert(path, out / "x"),
    "start_from": lambda path, out: everystep.Checkpointer(out / "run", {"w0": np.zeros(1)}).restore(
        init_from=path
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BOMBS)
def test_every_call_refuses_what_would_become_far_more(
    bombs: Path, tmp_path: Path, name: str, call: str
) -> None:
    with pytest.raises(DecompressionBomb, match=r"bytes of files would become .*max_inflation="):
        CALLS[call](bombs / name, tmp_path)
    assert not [found for found in tmp_path.iterdir() if found.name.startswith("x")]


@pytest.mark.parametrize("name", ["a.npz", "a.h5", "a.pt"])
def test_it_is_read_if_it_is_allowed(bombs: Path, name: str) -> None:
    found = inspect.describe(bombs / name, options=ANY)
    assert found.nbytes > LOW_NBYTES
    with everystep.open(bombs / name, options=ANY) as checkpoint:
        assert not checkpoint.read("w1")["w1"].any()
    exactly = math.ceil(found.nbytes / os.path.getsize(bombs / name))
    inspect.describe(bombs / name, options=everystep.Options(max_inflation=exactly))
    with pytest.raises(DecompressionBomb):
        inspect.describe(bombs / name, options=everystep.Options(max_inflation=exactly - 1))


def test_the_option_reaches_conversion_and_verification(tmp_path: Path) -> None:
    npz(tmp_path / "a.npz")
    with pytest.raises(DecompressionBomb):
        everystep.verify(tmp_path / "a.npz")
    assert everystep.verify(tmp_path / "a.npz", options=ANY).intact
    assert universal.convert(tmp_path / "a.npz", tmp_path / "x", select="w1", options=ANY).leaves == 1


def test_a_bomb_that_is_no_array_is_not_inflated_to_check_its_crc(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(3)}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/extra/0", bytes(LOW_NBYTES + 1))
    with pytest.raises(DecompressionBomb):
        everystep.verify(path)
    assert everystep.verify(path, options=ANY).intact


def test_the_header_of_an_array_is_not_inflated_beyond_what_any_takes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        nbytes = 1 << 30
        with archive.open("w.npy", "w", force_zip64=True) as member:
            member.write(b"\x93NUMPY\x02\x00" + nbytes.to_bytes(4, "little"))
            for _ in range(64):
                member.write(b" " * (1 << 20))
    with pytest.raises(CorruptCheckpoint, match=r"a\.npz"):
        everystep.load(tmp_path / "a.npz")


def test_arrays_of_zeros_up_to_the_limit_are_no_bomb(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(LOW_NBYTES - 4096, np.uint8))
    assert everystep.verify(tmp_path / "a.npz").intact
    np.savez_compressed(tmp_path / "b.npz", w=np.zeros(LOW_NBYTES + 1, np.uint8))
    with pytest.raises(DecompressionBomb):
        everystep.verify(tmp_path / "b.npz")


def test_256_mib_are_never_refused(bombs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflation, "ALWAYS_NBYTES", REAL_NBYTES)
    assert REAL_NBYTES == 256 << 20
    with everystep.open(bombs / "a.npz") as checkpoint:
        assert checkpoint.nbytes == COUNT * NBYTES
    with pytest.raises(DecompressionBomb):
        everystep.open(bombs / "b.h5")


@pytest.mark.parametrize("given", [0, 0.5, -1, math.nan, None, True, "100"])
def test_what_is_no_ratio_is_an_error(given: Any) -> None:
    with pytest.raises(ValueError, match="max_inflation must be a number from 1 on"):
        everystep.Options(max_inflation=given)


@pytest.mark.parametrize("arguments", [("show",), ("verify",), ("export", "x.safetensors"), ("convert", "x")])
def test_the_command_refuses_it_and_has_the_option(
    bombs: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    verb, *rest = arguments
    outputs = [str(tmp_path / name) for name in rest]
    found = command(verb, str(bombs / "a.h5"), *outputs)
    assert found.code == 1
    assert "--max-inflation" in found.err
    assert command(verb, str(bombs / "a.h5"), *outputs, "--max-inflation", "inf").code == 0
