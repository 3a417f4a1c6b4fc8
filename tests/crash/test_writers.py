"""Several processes at one run or path: one writes, the others are told; readers and children do no harm."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine import fs
from holdfast.store import list_steps, step_name

from .children import SECONDS, Pipe, forked
from .recovery import leftovers
from .states import blank_state, identify, load_identity, make_state

KEEP_ONE = holdfast.Keep(last=1)


def hold_run(run: Path) -> Callable[[Pipe], None]:
    """Opens a run for writing, says so, and keeps it until it is ended."""

    def work(pipe: Pipe) -> None:
        checkpointer = holdfast.Checkpointer(run, make_state(1), mode="sync")
        checkpointer.save(1)
        pipe.send(os.getpid())
        signal.pause()

    return work


# --- one writer per run ---------------------------------------------------------------------------


def test_a_second_writer_is_told_who_holds_the_run(ram: Path) -> None:
    run = ram / "run"
    with forked(hold_run(run)) as holder:
        assert holder.pipe.receive() == holder.pid
        with pytest.raises(holdfast.RunLocked) as caught:
            holdfast.Checkpointer(run, make_state(2), mode="sync")
        assert isinstance(caught.value, BlockingIOError)
        assert f"process {holder.pid} on {socket.gethostname()}" in str(caught.value)
        assert str(run) in str(caught.value)
        # Reading needs no lock.
        assert identify(holdfast.load(run)) == (1, 0)
    assert list_steps(str(run)) == [1]


def test_the_lock_of_a_killed_process_is_free_at_once(ram: Path) -> None:
    run = ram / "run"
    with forked(hold_run(run)) as holder:
        holder.pipe.receive()
        holder.kill()
        target = blank_state()
        with holdfast.Checkpointer(run, target, mode="sync") as checkpointer:
            assert checkpointer.restore() == 1
            checkpointer.save(2)


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(ram: Path) -> None:
    """Data-loader workers are such children; one that hangs must not keep training from starting again."""
    run = ram / "run"

    def parent(pipe: Pipe) -> None:
        checkpointer = holdfast.Checkpointer(run, make_state(1), mode="sync")
        checkpointer.save(1)
        worker = os.fork()
        if worker == 0:
            pipe.send(os.getpid())
            signal.pause()
        pipe.send("forked")
        signal.pause()

    with forked(parent) as child:
        said = [child.pipe.receive(), child.pipe.receive()]
        (worker,) = (item for item in said if item != "forked")
        try:
            child.kill()
            os.kill(worker, 0)  # it lives
            with holdfast.Checkpointer(run, blank_state(), mode="sync") as checkpointer:
                assert checkpointer.restore() == 1
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_forked_child_cannot_write_to_its_parents_run(ram: Path) -> None:
    with holdfast.Checkpointer(ram / "run", make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)

        def child(pipe: Pipe) -> None:
            with pytest.raises(holdfast.RunLocked, match=f"process {os.getppid()} on"):
                holdfast.Checkpointer(ram / "run", make_state(2), mode="sync")
            checkpointer.close()  # what it inherited: must not give up the parent's lock
            pipe.send("refused")

        with forked(child) as forked_child:
            assert forked_child.pipe.receive() == "refused"
            assert forked_child.wait() == 0
        with forked(hold_run(ram / "run")) as other:
            assert other.wait() == 1  # still locked
        checkpointer.save(2)


def test_two_writers_in_one_process_are_refused_too(ram: Path) -> None:
    with holdfast.Checkpointer(ram / "run", make_state(1), mode="sync") as checkpointer:
        with pytest.raises(holdfast.RunLocked, match="in this process already"):
            holdfast.Checkpointer(ram / "run", make_state(2), mode="sync")
        checkpointer.save(1)
        with forked(hold_run(ram / "run")) as other:
            assert other.wait() == 1  # the refusal did not cost us the lock
    with holdfast.Checkpointer(ram / "run", make_state(2), mode="sync") as checkpointer:
        checkpointer.save(2)


# --- one writer per path --------------------------------------------------------------------------


def save_on_a_word(pipe: Pipe, path: Path, version: int, start: tuple[int, int]) -> None:
    os.close(start[1])
    os.read(start[0], 1)  # returns when the parent closes its end
    try:
        holdfast.save(path, make_state(1, version), step=1)
        pipe.send(version)
    except (holdfast.RunLocked, holdfast.CheckpointExists, holdfast.SaveFailed) as error:
        pipe.send(type(error).__name__)


def test_two_saves_to_one_path_at_once_make_one_whole_checkpoint(ram: Path) -> None:
    """Many times, from four processes that begin on a word: one wins, the others say so, nothing is left."""
    path = ram / "model"
    for _ in range(15):
        start = os.pipe()
        with contextlib.ExitStack() as stack:
            children = [
                stack.enter_context(forked(save_on_a_word, path, version, start)) for version in range(4)
            ]
            os.close(start[0])
            os.close(start[1])
            said = [child.pipe.receive() for child in children]
            assert [child.wait() for child in children] == [0] * 4
        (winner,) = (item for item in said if isinstance(item, int))
        assert load_identity(str(path)) == (1, winner)
        assert os.listdir(ram) == ["model"]
        fs.remove_tree(str(path))


def test_a_save_in_progress_is_not_swept_by_another(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the first one's ``.partial``, sees that it is alive, and leaves it alone."""
    real = fs.write_file

    def write_file(path: str, data: bytes, more: bytes = b"", *, recycle: bool = False) -> object:
        """In the middle of the first save, a second one is tried."""
        monkeypatch.undo()
        with forked(_refused, ram / "model") as other:
            assert other.pipe.receive() == "RunLocked"
        return real(path, data, more, recycle=recycle)

    monkeypatch.setattr(fs, "write_file", write_file)
    holdfast.save(ram / "model", make_state(1), step=1)
    assert load_identity(str(ram / "model")) == (1, 0)


def _refused(pipe: Pipe, path: Path) -> None:
    with pytest.raises(holdfast.RunLocked, match=f"another process is saving to {path}"):
        holdfast.save(path, make_state(2), step=2)
    pipe.send("RunLocked")


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", ["later", "now"])
def test_a_reader_goes_on_when_its_checkpoint_is_retired(
    ram: Path, spare: str, request: pytest.FixtureRequest
) -> None:
    """Many saves retire and recycle others; what a reader has open is not written over, and not torn away."""
    if spare == "now":
        request.getfixturevalue("spare_now")
    run = ram / "run"
    with holdfast.Checkpointer(run, make_state(1), keep=KEEP_ONE, mode="sync") as checkpointer:
        checkpointer.save(1)
        reader = holdfast.open(run / step_name(1))
        inode = os.stat(run / step_name(1) / "r00000.v0.safetensors").st_ino
        for step in range(2, 8):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
            assert list_steps(str(run)) == [step]
            assert os.stat(run / step_name(step) / "r00000.v0.safetensors").st_ino != inode
            assert identify(reader.load()) == (1, 0)
            assert reader["narrow.u8"][3:5].tobytes() == make_state(1)["narrow"]["u8"][3:5].tobytes()
        reader.close()
        for step in (8, 9, 10):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
        # Once nobody reads it, it goes: a long training must not fill the disk.
        assert f"{step_name(1)}.retired" not in leftovers(run)
    assert leftovers(run) == []


def test_a_reader_in_another_process_goes_on_too(ram: Path) -> None:
    run = ram / "run"

    def read(pipe: Pipe) -> None:
        with holdfast.open(run / step_name(1)) as reader:
            pipe.send("open")
            os.kill(os.getpid(), signal.SIGSTOP)
            pipe.send(identify(reader.load()))

    with holdfast.Checkpointer(run, make_state(1), keep=KEEP_ONE, mode="sync") as checkpointer:
        checkpointer.save(1)
        with forked(read) as reader:
            assert reader.pipe.receive() == "open"
            os.waitpid(reader.pid, os.WUNTRACED)  # it has stopped: a signal to go on is not lost
            for step in range(2, 6):
                checkpointer.state = make_state(step)
                checkpointer.save(step)
            os.kill(reader.pid, signal.SIGCONT)
            assert reader.pipe.receive() == (1, 0)
            assert reader.wait() == 0


def test_readers_always_find_a_whole_checkpoint_while_it_is_replaced(
    ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``overwrite=True`` has no moment in which there is none, or half of one."""
    # Between the exchange and the end of the save a reader waits; the writer may wait for a processor then.
    monkeypatch.setattr("holdfast.store.hold._LOCK_SECONDS", SECONDS)
    path = ram / "model"
    holdfast.save(path, make_state(1, 0), step=1)
    reads = 200

    def read(pipe: Pipe) -> None:
        pipe.send("ready")
        seen = {load_identity(str(path)) for _ in range(reads)}
        deadline = time.monotonic() + SECONDS
        while len(seen) == 1 and time.monotonic() < deadline:  # a busy machine: the two have to meet
            seen.add(load_identity(str(path)))
        pipe.send(len(seen))

    with forked(read) as reader:
        assert reader.pipe.receive() == "ready"
        version = 0
        while not _readable(reader.pipe.reader):
            version += 1
            holdfast.save(path, make_state(1, version), step=1, overwrite=True)
        assert reader.pipe.receive() > 1  # versions; else the two did not meet
        assert reader.wait() == 0


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


# --- forks while a save is under way --------------------------------------------------------------


def test_forks_during_saves_harm_neither_side(tmp_path: Path, way: holdfast.Options) -> None:
    """Another thread forks all the time, as a data loader does; each child changes its copy of the arrays."""
    wide = 400_000
    run = tmp_path / "run"
    state = make_state(0, 0, wide)
    failures: list[str] = []
    stop = threading.Event()
    forks = 0

    def fork_on() -> None:
        nonlocal forks
        while not stop.is_set():
            pid = os.fork()
            if pid == 0:
                state["wide"][:] = 0  # the child's memory, not the parent's
                os._exit(0 if not np.any(state["wide"]) else 1)
            forks += 1
            if os.waitpid(pid, 0)[1] != 0:
                failures.append("a child did not see its own memory")

    forker = threading.Thread(target=fork_on)
    forker.start()
    try:
        with holdfast.Checkpointer(
            run, state, keep=holdfast.Keep(last=2), options=way, mode="sync"
        ) as checkpointer:
            step = 0
            while step < 12 or forks <= 3:  # a fast disk and a busy machine: the two have to meet
                step += 1
                state.update(make_state(step, 0, wide))
                checkpointer.save(step)
                assert identify(holdfast.load(run / step_name(step))) == (step, 0)
    finally:
        stop.set()
        forker.join(60)
    assert not forker.is_alive()
    assert failures == []


def test_a_child_forked_during_a_save_does_not_lock_the_checkpoint(
    ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits the descriptor that holds the directory; readers must not have to wait until it ends."""
    worker = -1
    real = fs.write_file

    def write_file(path: str, data: bytes, more: bytes = b"", *, recycle: bool = False) -> object:
        nonlocal worker
        worker = os.fork()
        if worker == 0:
            signal.pause()
        return real(path, data, more, recycle=recycle)

    monkeypatch.setattr(fs, "write_file", write_file)
    try:
        holdfast.save(ram / "model", make_state(1), step=1)
        monkeypatch.undo()
        assert load_identity(str(ram / "model")) == (1, 0)
        holdfast.save(ram / "model", make_state(2), step=2, overwrite=True)
        assert load_identity(str(ram / "model")) == (2, 0)
        assert os.listdir(ram) == ["model"]
    finally:
        monkeypatch.undo()
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_child_forked_during_a_save_that_was_killed_does_not_stop_the_next_one(ram: Path) -> None:
    """The parent dies in the middle of a save; a worker it forked then lives on; training starts again."""
    run = ram / "run"

    def parent(pipe: Pipe) -> None:
        checkpointer = holdfast.Checkpointer(run, make_state(1), mode="sync")
        checkpointer.save(1)
        real = fs.write_file

        def write_file(path: str, data: bytes, more: bytes = b"", *, recycle: bool = False) -> object:
            if os.fork() == 0:
                pipe.send(os.getpid())
                signal.pause()
            signal.pause()  # until the test, which has heard of the worker, kills us
            return real(path, data, more, recycle=recycle)

        fs.write_file = write_file  # type: ignore[assignment] # of this child only
        checkpointer.save(2)

    with forked(parent) as child:
        worker = child.pipe.receive()
        try:
            child.kill()
            assert leftovers(run) == [f"{step_name(2)}.partial"]
            target = blank_state()
            with holdfast.Checkpointer(run, target, mode="sync") as checkpointer:
                assert checkpointer.restore() == 1
                assert leftovers(run) == []
                checkpointer.state = make_state(2, 1)
                checkpointer.save(2)
            assert load_identity(str(run)) == (2, 1)
        finally:
            os.kill(worker, signal.SIGKILL)
