"""Readers: what is open stays readable, whatever writers do meanwhile, and lets go when it is closed."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.state import flatten
from everystep.store import Commit, WritableRun, step_name, whole
from everystep.store.read import open as opening
from support.worlds.several_ranks import write_several

STATE = {"w": np.arange(300_000)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    everystep.save(tmp_path / "c", STATE)
    return tmp_path / "c"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_open_checkpoint_is_readable_after_a_rename(path: Path) -> None:
    with everystep.open(path) as opened:
        path.rename(path.with_name("elsewhere"))
        assert np.array_equal(opened["w"][5:9], STATE["w"][5:9])
        assert np.array_equal(opened.load()["w"], STATE["w"])


def test_an_open_checkpoint_is_readable_after_it_was_removed(path: Path) -> None:
    with everystep.open(path) as opened:
        shutil.rmtree(path)
        assert np.array_equal(opened.load()["w"], STATE["w"])


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A checkpoint that three ranks wrote."""
    leaf = LeafLayout("w", "I64", STATE["w"].shape, (MeshPlacement(Mesh.grid(3), (Split(0, 0),)),), "numpy")
    write_several(tmp_path / "several", WritePlan([leaf], Topology.regular(3)), STATE)
    return tmp_path / "several"


def test_an_open_checkpoint_of_several_ranks_is_readable_after_it_was_replaced(several: Path) -> None:
    before = open_descriptors()
    with everystep.open(several) as opened:
        everystep.save(several, {"w": np.zeros(3)}, overwrite=True)
        assert np.array_equal(opened["w"][-9:], STATE["w"][-9:])
        assert np.array_equal(opened.load()["w"], STATE["w"])
    assert open_descriptors() == before
    assert everystep.load(several)["w"].tolist() == [0, 0, 0]


def test_what_is_out_of_reach_since_it_was_replaced_is_not_called_damage(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_MAX_PINNED", 0)
    with everystep.open(several) as opened:
        shutil.rmtree(several)
        with pytest.raises(everystep.CheckpointNotFound, match="replaced or removed while it was read"):
            opened.load()


def test_a_process_without_descriptors_reads_what_it_can_still_name(several: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 7, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(6):  # the directory, and the five files beside the manifest, would take them all
            os.close(taken.pop())
        found = everystep.load(several)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)
    assert np.array_equal(found["w"], STATE["w"])


def test_a_file_that_cannot_even_be_held_is_reported_when_it_is_read(path: Path) -> None:
    shard = path / "r00000.v0.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)  # leads to itself
    with everystep.open(path) as opened, pytest.raises(everystep.errors.ReadFailed, match=r"v0\.safetensors"):
        opened.load()


def test_a_closed_checkpoint_says_so(path: Path) -> None:
    opened = everystep.open(path)
    leaf = opened["w"]
    opened.close()
    opened.close()  # twice is once
    for read in (lambda: leaf[0], opened.read, opened.load):
        with pytest.raises(everystep.errors.CheckpointClosed, match="closed"):
            read()
    assert opened.step == 0  # what is known stays known


def test_nothing_stays_open(path: Path) -> None:
    gc.collect()  # what earlier tests have left goes first
    before = open_descriptors()
    with everystep.open(path) as opened:
        assert opened["w"][0] == 0
    everystep.load(path)
    everystep.open(path)["w"][0]
    everystep.verify(path)
    with pytest.raises(everystep.StateMismatch):
        everystep.load(path, into={"x": np.zeros(3)})
    (path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(everystep.CorruptCheckpoint):
        everystep.open(path)
    gc.collect()
    assert open_descriptors() == before


def save(run: WritableRun, step: int, state: object) -> None:
    tuning = everystep.Options().tuning()
    transaction = run.begin(step, overwrite=True)
    info = Commit(transaction, step, {}, tuning).run(whole(flatten(state)))
    run.committed(step, transaction, info)


def test_a_forked_child_that_closes_its_copy_does_not_give_up_its_parents_hold(tmp_path: Path) -> None:
    run = WritableRun(os.fspath(tmp_path))
    save(run, 1, {"w": np.arange(1 << 20)})
    with everystep.open(tmp_path) as opened:
        pid = os.fork()
        if pid == 0:
            opened.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        run.retire([1])
        save(run, 2, {"w": np.zeros(1 << 20)})
        save(run, 3, {"w": np.zeros(1 << 20)})
        assert np.array_equal(opened.load()["w"], np.arange(1 << 20))
    run.close()


def test_a_checkpoint_can_be_read_without_permission_to_write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "c")
        everystep.save(path, STATE)
        script = """
            import os, sys
            import numpy as np
            import everystep
            from everystep.engine import probe
            assert everystep.verify(sys.argv[1]).intact  # imports all there is, while that is allowed
            probe._known.clear()
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            with everystep.open(sys.argv[1]) as opened:
                assert opened["w"][7] == 7
                assert np.array_equal(opened.load()["w"], np.arange(300_000))
            assert everystep.verify(sys.argv[1]).intact
            try:
                everystep.save(os.path.join(os.path.dirname(sys.argv[1]), "d"), {"w": 1})
            except everystep.errors.StorageDenied as error:
                assert "chown or chmod" in str(error), error
            else:
                raise AssertionError("it could be written")
        """
        os.chmod(folder, 0o555)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), path], capture_output=True, text=True, timeout=300
        )
        os.chmod(folder, 0o755)
        assert done.returncode == 0, done.stderr


# --- and writers: see also tests/checkpointer ---------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WritableRun]:
    opened = WritableRun(os.fspath(tmp_path))
    yield opened
    opened.close()


def names(run: WritableRun) -> list[str]:
    return sorted(name for name in os.listdir(run.path) if name != ".lock")


def test_what_a_reader_holds_is_removed_once_it_lets_go(run: WritableRun) -> None:
    """A long training must not collect what readers held for a while."""
    for step in (1, 2, 3):
        save(run, step, {"w": np.full(100, step)})
    reader = everystep.open(run.path_of(1))
    second = everystep.open(run.path_of(2))
    run.retire([1, 2])
    save(run, 4, {"w": np.full(100, 4)})
    save(run, 5, {"w": np.full(100, 5)})
    assert reader.load()["w"][0] == 1
    assert second.load()["w"][0] == 2
    reader.close()
    second.close()
    save(run, 6, {"w": np.full(100, 6)})
    assert names(run) == [step_name(step) for step in (3, 4, 5, 6)]


def test_a_step_can_be_retired_again_while_its_predecessor_is_read(run: WritableRun) -> None:
    save(run, 1, {"w": np.full(100, 1)})
    with everystep.open(run.path_of(1)) as reader:
        run.retire([1])
        save(run, 1, {"w": np.full(100, 2)})
        save(run, 2, {"w": np.full(100, 3)})
        run.retire([1])
        save(run, 3, {"w": np.full(100, 4)})
        assert reader.load()["w"][0] == 1
    save(run, 4, {"w": np.full(100, 5)})
    assert [name for name in names(run) if "." not in name] == [step_name(step) for step in (2, 3, 4)]
