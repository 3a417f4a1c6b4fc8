"""`verify` of what other systems wrote: what their formats allow is checked, and the report says what."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import everystep
from everystep.errors import CheckpointNotFound, UnsupportedSource
from support.processes.command import command

STATE = {"w": torch.arange(5000.0), "v": torch.ones(3, 4)}
ARRAYS = {name: tensor.numpy() for name, tensor in STATE.items()}
ARCHIVES = "no checksums, but the CRCs of its archives, sizes and structure agree"
OTHERS = "no checksums, but sizes and structure agree"


def without_crcs(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=ARRAYS["w"], compression="gzip", fletcher32=True)


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a.pt": (f"torch: {ARCHIVES}", lambda path: torch.save(STATE, path)),
    "b.pt": (f"torch: {OTHERS}", without_crcs),
    "a.npz": (f"npz: {ARCHIVES}", lambda path: np.savez(path, **ARRAYS)),
    "b.npz": (f"npz: {ARCHIVES}", lambda path: np.savez_compressed(path, **ARRAYS)),
    "dcp": (f"dcp: {ARCHIVES}", lambda path: dcp.save(STATE, checkpoint_id=path)),
    "a.safetensors": (f"safetensors: {OTHERS}", lambda path: safetensors.torch.save_file(STATE, path)),
    "a.h5": (f"hdf5: {OTHERS}", hdf5),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: no test changes it."""
    folder = tmp_path_factory.mktemp("written")
    for name, (_, write) in WRITERS.items():
        write(folder / name)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("name", WRITERS)
def test_an_undamaged_one_is_readable_and_the_report_says_what_was_checked(written: Path, name: str) -> None:
    report = everystep.verify(written / name)
    assert report.problems == ()
    assert report.intact
    assert report.instead == WRITERS[name][0]
    shown = command("verify", written / name)
    assert shown.code == 0
    assert "readable" in shown.out
    assert "no checksums" in " ".join(shown.out.split())
    (document,) = command("verify", written / name, "--json").document["checkpoints"]
    assert document["instead"] == report.instead


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "b.npz", "dcp", "a.h5"])
def test_a_changed_byte_of_an_array_is_found(written: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shutil.copytree(written / name, path) if name == "dcp" else shutil.copy(written / name, path)
    file = path / "__0_0.distcp" if name == "dcp" else path
    data = bytearray(file.read_bytes())
    at = data.find(ARRAYS["w"].tobytes()[4000:4064])
    data[at if at >= 0 else len(data) * 2 // 3] ^= 4
    file.write_bytes(data)
    report = everystep.verify(path)
    assert not report.intact
    assert {problem.file for problem in report.problems} == {str(file)}
    assert command("verify", path).code == 1


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "dcp"])
def test_a_truncated_file_is_damage(written: Path, tmp_path: Path, name: str) -> None:
    data = (written / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
    report = everystep.verify(tmp_path / name)
    assert not report.intact
    assert report.problems[0].file == str(tmp_path / name)


def test_what_everystep_cannot_read_is_not_called_damaged(tmp_path: Path) -> None:
    torch.save({"w": Path}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedSource, match="pathlib"):
        everystep.verify(tmp_path / "x.pt")
    shown = command("verify", tmp_path / "x.pt")
    assert shown.code == 1
    assert "DAMAGED" not in shown.out + shown.err


def test_a_damaged_checkpoint_of_our_own_is_still_damaged(tmp_path: Path) -> None:
    everystep.save(tmp_path / "run" / "step-000000000001", {"w": np.arange(3)}, step=1)
    (tmp_path / "run" / "step-000000000001" / "r00000.v0.safetensors").unlink()
    assert command("verify", tmp_path / "run").code == 1
    with pytest.raises(CheckpointNotFound):
        everystep.verify(tmp_path / "nothing")


@pytest.mark.parametrize("arguments", [["verify", ""], ["ls", ""], ["convert", "a.pt", ""], ["show", ""]])
def test_an_empty_path_is_wrong_usage_and_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    everystep.save(tmp_path / "step-000000000001", {"w": np.arange(3)}, step=1)
    shown = command(*arguments)
    assert shown.code == 2
    assert "a path is empty" in " ".join(shown.err.split())
    assert command("verify", ".").code == 0


def test_calls_refuse_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        everystep.load,
        everystep.open,
        everystep.verify,
        lambda path: everystep.save(path, {"a": 1}),
    ):
        with pytest.raises(ValueError, match="the path is empty"):
            call("")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 20) - 128, (3 << 20) + 1, 17 << 20])
def test_compressed_records_of_every_size_match_their_crcs(tmp_path: Path, nbytes: int) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(nbytes, np.uint8))
    assert everystep.verify(tmp_path / "a.npz").problems == ()
