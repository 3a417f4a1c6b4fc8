"""Files that a process has mapped or opened are not written over: the next save makes new ones instead."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Checkpointer, Keep
from everystep.engine import faults
from everystep.store import step_name

SHARD = "r00000.v0.safetensors"
SIZES = {"small": 100, "large": 1 << 20}


@contextmanager
def training(
    run: Path, size: int, options: everystep.Options | None = None
) -> Iterator[Callable[[int], None]]:
    """Saves a state that tells its step; each save from the fourth on writes over another's files."""
    state = {"w": np.zeros(size, np.int64)}
    with Checkpointer(run, state, keep=Keep(last=1), mode="sync", options=options) as checkpointer:

        def save(step: int) -> None:
            state["w"][:] = step
            checkpointer.save(step)

        yield save


def shard(run: Path, step: int) -> Path:
    return run / step_name(step) / SHARD


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_files_are_written_over_where_no_other_process_uses_them(tmp_path: Path) -> None:
    for name, size in SIZES.items():
        with training(tmp_path / name, size) as save:
            used = set()
            for step in range(1, 9):
                save(step)
                used.add(inode(shard(tmp_path / name, step)))
            assert len(used) <= 3


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_tensors_that_safetensors_has_mapped_keep_their_values(tmp_path: Path, size: int) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    safetensors = pytest.importorskip("safetensors")
    with training(tmp_path, size) as save:
        save(1)
        loaded = numpy.load_file(shard(tmp_path, 1))
        with safetensors.safe_open(shard(tmp_path, 1), "numpy") as opened:
            for step in range(2, 9):
                save(step)
                assert everystep.load(tmp_path)["w"][0] == step
            assert set(opened.get_tensor("w").ravel().tolist()) == {1}
        assert set(loaded["w"].ravel().tolist()) == {1}


def test_tensors_that_torch_has_mapped_keep_their_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("safetensors.torch")
    with training(tmp_path, 1 << 20) as save:
        save(1)
        loaded = torch.load_file(shard(tmp_path, 1))
        for step in range(2, 9):
            save(step)
        assert set(loaded["w"].tolist()) == {1}


@pytest.mark.parametrize("backend", ["uring", "threads", "buffered"])
@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
def test_every_backend_spares_what_is_mapped(tmp_path: Path, backend: str, name: str) -> None:
    try:
        options = everystep.Options(backend=backend)  # type: ignore[arg-type]
        everystep.save(tmp_path / "trial", {"w": np.zeros(1 << 20)}, options=options)
    except everystep.errors.EngineUnavailable as error:
        pytest.skip(str(error))
    with training(tmp_path / "run", 1 << 18, options) as save:
        save(1)
        with (
            open(tmp_path / "run" / step_name(1) / name, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            before = bytes(mapped)
            file.close()  # the mapping alone is enough
            for step in range(2, 9):
                save(step)
                assert everystep.load(tmp_path / "run")["w"][0] == step
            assert bytes(mapped) == before


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_file_that_another_process_has_open_keeps_its_bytes(tmp_path: Path, size: int) -> None:
    with training(tmp_path, size) as save:
        save(1)
        before = shard(tmp_path, 1).read_bytes()
        reader = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read(); print(sys.argv)", "x"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[opened := os.open(shard(tmp_path, 1), os.O_RDONLY)],
        )
        try:
            kept = os.dup(opened)
            os.close(opened)
            for step in range(2, 9):
                save(step)
                assert everystep.load(tmp_path)["w"][0] == step
            assert os.pread(kept, len(before), 0) == before
            os.close(kept)
        finally:
            reader.communicate(timeout=60)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("fault", ["lease:1:EAGAIN+", "lease:2:EACCES", "lease:1:EINVAL"])
def test_where_no_lease_is_given_new_files_are_made(tmp_path: Path, size: int, fault: str) -> None:
    with training(tmp_path, size) as save, faults.injected(fault):
        for step in range(1, 7):
            save(step)
            assert everystep.load(tmp_path)["w"][0] == step
            assert everystep.verify(tmp_path / step_name(step)).intact


def test_who_opens_a_file_that_is_being_written_over_waits_and_the_writer_lives(tmp_path: Path) -> None:
    """The kernel tells the writer by a signal, whose default action would end the process: not this one."""
    script = """
import os, sys, threading
import numpy as np
import everystep
from everystep.engine import faults
run = sys.argv[1]
state = {"w": np.zeros(1 << 20, np.int64)}
with everystep.Checkpointer(run, state, keep=everystep.Keep(last=1), mode="sync") as checkpointer:
    for step in range(1, 5):
        state["w"][:] = step
        checkpointer.save(step)
    folder = os.open(os.path.join(run, "step-000000000003.retired"), os.O_RDONLY)
    seen = []
    writing = threading.Event()
    def look():
        writing.wait()
        file = os.open("r00000.v0.safetensors", os.O_RDONLY, dir_fd=folder)
        seen.append(set(np.frombuffer(os.pread(file, 9 << 20, 4096), np.int64)[:1 << 20].tolist()))
    thread = threading.Thread(target=look)
    thread.start()
    state["w"][:] = 5
    threading.Timer(0.2, writing.set).start()
    with faults.injected("write:1:slow1500"):
        checkpointer.save(5)
    thread.join(60)
    print(seen)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "{5}" in done.stdout or "{0, 5}" in done.stdout, done.stdout
