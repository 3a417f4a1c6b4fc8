"""The engine's core by itself, without Python: on arm64 (under qemu), and under sanitizers.

Compiling it takes a minute, so this is opt-in: `make arm`, or `-m native`. `core.cpp` holds what is tried.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
QEMU = "qemu-aarch64-static"
SECONDS = 300


def built(kind: str) -> str:
    subprocess.run(["make", "-s", "-j2", f"build/core-{kind}/core"], cwd=ROOT, check=True, timeout=SECONDS)
    return str(ROOT / "build" / f"core-{kind}" / "core")


def succeeds(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def arm64() -> str:
    for needed, package in ((QEMU, "qemu-user-static"), ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not there: install {package}, or run `make arm` as root")
    return built("arm64")


@pytest.fixture(scope="module", params=["address", "thread"])
def sanitized(request: pytest.FixtureRequest) -> str:
    return built(request.param)


@pytest.mark.parametrize("page_nbytes", [4096, 16 << 10, 64 << 10])
def test_arm64_writes_and_reads_exact_bytes_whatever_the_page_size(
    arm64: str, tmp_path: Path, page_nbytes: int
) -> None:
    succeeds(QEMU, "-p", str(page_nbytes), arm64, "files", str(tmp_path))


def test_arm64_computes_the_same_checksums_as_the_library(arm64: str) -> None:
    succeeds(QEMU, arm64, "hash")


def test_the_core_hashes_writes_and_reads_under_a_sanitizer(sanitized: str, tmp_path: Path) -> None:
    succeeds(sanitized, "hash")
    succeeds(sanitized, "files", str(tmp_path))


def test_threads_outlive_exit_handlers_with_faults_installed(sanitized: str, tmp_path: Path) -> None:
    succeeds(sanitized, "exit", str(tmp_path))
