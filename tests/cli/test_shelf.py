"""``everystep shelf ls|show|verify|export``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everystep import Shelf
from support.processes.command import command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "fit.shelf"
    with Shelf(path, "4MiB") as shelf, shelf.transaction():
        shelf.centers = np.arange(6.0).reshape(2, 3)
        shelf.n_iter = 3
        shelf.history = {"losses": np.arange(4), "note": "x"}
    return path


def test_ls_lists_entries_and_space(path: Path) -> None:
    outcome = command("shelf", "ls", path)
    assert outcome.code == 0, outcome.err
    assert any(
        line.startswith("centers array F64 2 x 3") or "centers array F64" in line for line in outcome.lines
    )
    assert "3 entries" in outcome.out
    found = command("shelf", "ls", path, "--json").document
    assert [entry["name"] for entry in found["entries"]] == ["centers", "history", "n_iter"]
    assert found["usage"]["limit"] == 4 << 20


def test_show_prints_values(path: Path) -> None:
    outcome = command("shelf", "show", path)
    assert "n_iter = 3" in outcome.out
    assert command("shelf", "show", path, "n_iter", "--json").document["values"] == {"n_iter": "3"}
    missing = command("shelf", "show", path, "other")
    assert missing.code == 1
    assert "no entry 'other'" in missing.err


def test_verify_finds_damage(path: Path) -> None:
    assert "intact: 3 entries" in command("shelf", "verify", path).out
    with Shelf(path) as shelf:
        shelf.n_iter = 4  # so that the array is not of the last commit
    whole = path.read_bytes()
    data = bytearray(whole)
    data[data.find(np.arange(6.0).tobytes()) + 9] ^= 1
    path.write_bytes(data)
    outcome = command("shelf", "verify", path)
    assert outcome.code == 1
    assert "damaged: centers: the checksum" in outcome.out
    data = bytearray(whole)
    data[data.find(b"n_iter4") + 6] = ord("5")
    path.write_bytes(data)
    outcome = command("shelf", "verify", path, "--json")
    assert outcome.code == 1
    assert "directory node" in outcome.document["warning"]
    assert "the one before it" in command("shelf", "ls", path).out
    assert command("shelf", "verify", path.with_name("none")).code == 1


def test_export_to_npz_and_safetensors(path: Path, tmp_path: Path) -> None:
    outcome = command("shelf", "export", path, tmp_path / "out.npz")
    assert outcome.code == 0, outcome.err
    with np.load(tmp_path / "out.npz") as found:
        assert found["centers"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found["history.losses"].tolist() == [0, 1, 2, 3]
        assert int(found["n_iter"]) == 3
    assert "left out: history" in outcome.out
    safetensors = pytest.importorskip("safetensors.numpy")
    assert command("shelf", "export", path, tmp_path / "out.safetensors").code == 0
    found = safetensors.load_file(tmp_path / "out.safetensors")
    assert found["centers"].tolist() == [[0, 1, 2], [3, 4, 5]]
    again = command("shelf", "export", path, tmp_path / "out.npz")
    assert again.code == 1
    assert command("shelf", "export", path, tmp_path / "out.npz", "--force").code == 0
    assert command("shelf", "export", path, tmp_path / "out.txt").code == 1
    assert not list(tmp_path.glob("*.partial"))


def test_doctor_names_the_medium(tmp_path: Path) -> None:
    found = command("doctor", tmp_path, "--no-speed", "--json").document
    assert found["shelf_medium"].split(" (")[0] in ("page cache", "memory", "persistent memory")


def test_the_commit_of_an_entry_counts_as_the_commits_of_the_shelf(path: Path) -> None:
    lines = command("shelf", "ls", path).lines
    assert [line.split()[-1] for line in lines if line.startswith(("centers", "n_iter"))] == ["1", "1"]
    assert "commit 1," in lines[-1]
    with Shelf(path) as shelf:
        shelf.n_iter = 4
    lines = command("shelf", "ls", path).lines
    assert [line.split()[-1] for line in lines if line.startswith(("centers", "n_iter"))] == ["1", "2"]
    assert "commit 2," in lines[-1]


def test_a_directory_is_not_a_shelf(tmp_path: Path) -> None:
    outcome = command("shelf", "ls", tmp_path)
    assert outcome.code == 1
    assert f"there is no shelf at {tmp_path}: it is a directory" in outcome.err
