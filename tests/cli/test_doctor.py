"""``everystep doctor``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everystep.engine import Capabilities, probe
from everystep.inspect import machine
from everystep.inspect.machine import Choice, Mount, Speed
from support.processes.command import command

ABLE = Capabilities(True, "", True, "", 512, 512)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SPEED_NBYTES", 4 << 20)


def test_says_which_backend_and_why(tmp_path: Path) -> None:
    outcome = command("doctor", tmp_path, "--no-speed")
    assert outcome.code == 0
    names = {line.split()[0] for line in outcome.lines if line}
    assert {"everystep", "machine", "directory", "filesystem", "io_uring", "backend", "checksums"} <= names
    assert "durable write" not in outcome.out


def test_json_schema(tmp_path: Path, quick: None) -> None:
    document = command("doctor", tmp_path, "--json").document
    assert set(document) == {
        *("directory", "everystep", "python", "kernel", "cpus", "memory_nbytes", "torch", "nvidia", "mount"),
        *("device", "free_nbytes", "capabilities", "huge_pages", "choice", "hash_nbytes_per_second", "speed"),
        *("problems", "advice", "shelf_medium"),
    }
    assert document["directory"] == str(tmp_path)
    assert set(document["capabilities"]) == {
        *("uring", "uring_reason", "direct", "direct_reason", "memory_alignment", "offset_alignment"),
    }
    assert document["choice"]["backend"] in ("uring", "threads", "buffered")
    assert set(document["speed"]) == {"nbytes", "write_seconds", "read_seconds", "sync_seconds", "cached"}
    assert all(document["speed"][name] > 0 for name in ("write_seconds", "read_seconds", "sync_seconds"))
    assert document["problems"] == []


def test_measured_speed_is_shown_and_nothing_is_left(tmp_path: Path, quick: None) -> None:
    outcome = command("doctor", tmp_path)
    assert outcome.code == 0
    for name in ("durable write", "read", "sync of 4 KiB"):
        assert any(line.startswith(name) for line in outcome.lines)
    assert list(tmp_path.iterdir()) == []


def test_works_in_memory_and_warns_of_it(quick: None) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or machine.find_mount(str(shared)).kind != "tmpfs":
        pytest.skip("no writable tmpfs at /dev/shm")
    outcome = command("doctor", shared)
    assert outcome.code == 0
    assert "nothing saved here survives a power cut" in outcome.out


def test_a_forced_backend_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYSTEP_BACKEND", "buffered")
    choice = command("doctor", tmp_path, "--no-speed", "--json").document["choice"]
    assert choice["backend"] == "buffered"
    assert "EVERYSTEP_BACKEND" in choice["why"]


@pytest.mark.parametrize(
    ("able", "forced", "complaint"),
    [
        (ABLE, "nonsense", "unknown backend"),
        (Capabilities(False, "forbidden by seccomp", True, "", 512, 512), "uring", "forbidden by seccomp"),
        (Capabilities(True, "", False, "no O_DIRECT", 0, 0), "threads", "no O_DIRECT"),
    ],
)
def test_a_backend_that_cannot_be_used_is_a_problem(
    able: Capabilities, forced: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(probe._known, tmp_path.stat().st_dev, able)
    monkeypatch.setenv("EVERYSTEP_BACKEND", forced)
    outcome = command("doctor", tmp_path, "--json")
    assert outcome.code == 1
    (problem,) = outcome.document["problems"]
    assert complaint in problem
    assert outcome.document["speed"] is None


@pytest.mark.parametrize(
    ("able", "backend", "why"),
    [
        (Capabilities(False, "forbidden by seccomp", True, "", 512, 512), "threads", "forbidden by seccomp"),
        (Capabilities(True, "", False, "no O_DIRECT", 0, 0), "buffered", "no O_DIRECT"),
    ],
)
def test_says_why_not_the_faster_backend(
    able: Capabilities, backend: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(probe._known, tmp_path.stat().st_dev, able)
    outcome = command("doctor", tmp_path, "--no-speed")
    assert outcome.code == 0
    line = next(line for line in outcome.lines if line.startswith("backend"))
    assert line.startswith(f"backend {backend}: ")
    assert why in line


def test_a_directory_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: str) -> Capabilities:
        raise PermissionError(13, "Permission denied", directory)

    monkeypatch.setattr(machine.engine, "capabilities", refuse)
    outcome = command("doctor", tmp_path)
    assert outcome.code == 1
    assert "problem: cannot write here: Permission denied" in outcome.out


def test_torch_is_named_without_importing_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    pytest.importorskip("torch")
    code = """
import sys
from everystep.cli.app import app
app(["doctor", sys.argv[1], "--no-speed"], standalone_mode=False)
print("torch imported:", "torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240, check=True
    )
    assert "torch imported: False" in result.stdout
    assert ", torch " in result.stdout


def test_torch_is_asked_for_gpus_on_request(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = command("doctor", tmp_path, "--no-speed", "--torch", "--json").document["torch"]
    assert found["cuda"] in (True, False)


def advice(mount: Mount, backend: str = "uring", speed: Speed | None = None, *, huge: bool = True) -> str:
    return "\n".join(machine._advice(mount, None, ABLE, huge, Choice(backend, ""), speed))


def test_advice_follows_from_the_facts() -> None:
    ext4 = Mount("ext4", "/", "/dev/sda", ("rw",))
    assert advice(ext4) == ""
    assert "transparent_hugepage" in advice(ext4, huge=False)
    assert "barriers" in advice(Mount("ext4", "/", "/dev/sda", ("rw", "nobarrier")))
    assert "network" in advice(Mount("nfs4", "/data", "server:/data", ("rw",)))
    assert "unset EVERYSTEP_BACKEND" in advice(ext4, "buffered")
    assert "a sync takes long" in advice(ext4, speed=Speed(1, 1.0, 1.0, 0.2, False))


def test_the_mount_of_a_directory_is_the_innermost(tmp_path: Path) -> None:
    assert machine.find_mount("/proc/self").kind == "proc"
    assert machine.find_mount("/").point == "/"
