"""Several processes at one run or path: one writes, the others are told; readers and children do no harm."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.engine import Backend, faults, fs
from everystep.store import list_steps, step_name
from support.crashes.recovery import leftovers
from support.processes.child_processes import SECONDS, Pipe, forked
from support.states.identified_states import blank_state, identify, load_identity, make_state
from support.worlds.patience import stop_here

pytestmark = pytest.mark.race

KEEP_ONE = everystep.Keep(last=1)


def hold_run(run: Path) -> Callable[[Pipe], None]:
    """Opens a run for writing, says so, and keeps it until it is ended."""

    def work(pipe: Pipe) -> None:
        checkpointer = everystep.Checkpointer(run, make_state(1), mode="sync")
        checkpointer.save(1)
        pipe.send(os.getpid())
        signal.pause()

    return work


# --- one writer per run ---------------------------------------------------------------------------


def test_a_second_writer_gets_an_error_that_names_the_holder_of_the_run(ram: Path) -> None:
    run = ram / "run"
    with forked(hold_run(run)) as holder:
        assert holder.pipe.receive() == holder.pid
        with pytest.raises(everystep.errors.Locked) as caught:
            everystep.Checkpointer(run, make_state(2), mode="sync")
        assert isinstance(caught.value, BlockingIOError)
        assert f"process {holder.pid} on {socket.gethostname()}" in str(caught.value)
        assert str(run) in str(caught.value)
        # Reading needs no lock.
        assert identify(everystep.load(run)) == (1, 0)
    assert list_steps(str(run)) == [1]


def test_the_lock_of_a_killed_process_is_free_at_once(ram: Path) -> None:
    run = ram / "run"
    with forked(hold_run(run)) as holder:
        holder.pipe.receive()
        holder.kill()
        target = blank_state()
        with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
            assert checkpointer.restore() == 1
            checkpointer.save(2)


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(ram: Path) -> None:
    """Data-loader workers are such children; one that hangs must not keep training from starting again."""
    run = ram / "run"

    def parent(pipe: Pipe) -> None:
        checkpointer = everystep.Checkpointer(run, make_state(1), mode="sync")
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
            with everystep.Checkpointer(run, blank_state(), mode="sync") as checkpointer:
                assert checkpointer.restore() == 1
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_forked_child_cannot_write_to_its_parents_run(ram: Path) -> None:
    with everystep.Checkpointer(ram / "run", make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)

        def child(pipe: Pipe) -> None:
            with pytest.raises(everystep.errors.Locked, match=f"process {os.getppid()} on"):
                everystep.Checkpointer(ram / "run", make_state(2), mode="sync")
            checkpointer.close()  # what it inherited: must not give up the parent's lock
            pipe.send("refused")

        with forked(child) as forked_child:
            assert forked_child.pipe.receive() == "refused"
            assert forked_child.wait() == 0
        with forked(hold_run(ram / "run")) as other:
            assert other.wait() == 1  # still locked
        checkpointer.save(2)


def test_two_writers_in_one_process_are_refused_too(ram: Path) -> None:
    with everystep.Checkpointer(ram / "run", make_state(1), mode="sync") as checkpointer:
        with pytest.raises(everystep.errors.Locked, match="in this process already"):
            everystep.Checkpointer(ram / "run", make_state(2), mode="sync")
        checkpointer.save(1)
        with forked(hold_run(ram / "run")) as other:
            assert other.wait() == 1  # the refusal did not cost us the lock
    with everystep.Checkpointer(ram / "run", blank_state(), mode="sync") as checkpointer:
        checkpointer.restore()
        checkpointer.save(2)


# --- one writer per path --------------------------------------------------------------------------


def save_on_a_word(pipe: Pipe, path: Path, version: int, start: tuple[int, int]) -> None:
    os.close(start[1])
    os.read(start[0], 1)  # returns when the parent closes its end
    try:
        everystep.save(path, make_state(1, version), step=1)
        pipe.send(version)
    except (everystep.errors.Locked, everystep.CheckpointExists, everystep.SaveFailed) as error:
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
            assert other.pipe.receive() == "Locked"
        return real(path, data, more, recycle=recycle)

    monkeypatch.setattr(fs, "write_file", write_file)
    everystep.save(ram / "model", make_state(1), step=1)
    assert load_identity(str(ram / "model")) == (1, 0)


def _refused(pipe: Pipe, path: Path) -> None:
    with pytest.raises(everystep.errors.Locked, match=f"another process is saving to {path}"):
        everystep.save(path, make_state(2), step=2)
    pipe.send("Locked")


def _overwrite_slowly(pipe: Pipe, path: Path, version: int, fault: str) -> None:
    pipe.send("begun")
    while True:
        try:
            with faults.injected(fault):
                everystep.save(path, make_state(1, version), step=1, overwrite=True)
        except everystep.errors.Locked:
            continue
        pipe.send("durable")
        return


@pytest.mark.parametrize(
    "fault", ["exchange:1:slow400", "sync_dir:2:slow400", "unlink:1:slow400", "rmdir:1:slow400"]
)
def test_what_is_being_replaced_is_not_swept_by_the_next_writer(ram: Path, fault: str) -> None:
    """Else the first one would go on to remove what the second has put in its place."""
    path = ram / "model"
    everystep.save(path, make_state(1, 0), step=1)
    with forked(_overwrite_slowly, path, 1, fault) as first:
        assert first.pipe.receive() == "begun"
        outcomes = set()
        while not first.pipe.ready():
            try:
                everystep.save(path, make_state(1, 2), step=1, overwrite=True)
                outcomes.add("durable")
            except everystep.errors.Locked:
                outcomes.add("locked")
        assert first.pipe.receive() == "durable"
    assert "locked" in outcomes
    assert load_identity(str(path))[1] in (1, 2)
    assert os.listdir(ram) == ["model"]


def _overwrite_often(pipe: Pipe, path: Path, version: int) -> None:
    durable = 0
    for _ in range(60):
        try:
            everystep.save(path, make_state(1, version), step=1, overwrite=True)
            durable += 1
        except everystep.errors.Locked:
            time.sleep(0.0005 * version)
    pipe.send(durable)


def test_many_writers_that_replace_one_checkpoint_leave_a_whole_one_at_any_time(ram: Path) -> None:
    path = ram / "model"
    everystep.save(path, make_state(1, 0), step=1)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(forked(_overwrite_often, path, version)) for version in (1, 2, 3)]
        while not all(child.pipe.ready() for child in children):
            assert load_identity(str(path))[0] == 1
        assert sum(child.pipe.receive() for child in children) > 0
        assert [child.wait() for child in children] == [0] * 3
    assert load_identity(str(path))[1] in (1, 2, 3)
    assert os.listdir(ram) == ["model"]


# --- links ----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """What is not ours, for links to lead to."""
    other = tmp_path / "elsewhere"
    (other / "inner").mkdir(parents=True)
    (other / "thesis.txt").write_text("years of work")
    (other / "inner" / "data.csv").write_text("1,2")
    return other


def _untouched(elsewhere: Path) -> bool:
    files = {
        str(file.relative_to(elsewhere)): file.read_text() for file in elsewhere.rglob("*") if file.is_file()
    }
    return files == {"thesis.txt": "years of work", "inner/data.csv": "1,2"}


def test_leftovers_that_are_links_are_unlinked_and_not_followed(ram: Path, elsewhere: Path) -> None:
    (ram / "model.partial").symlink_to(elsewhere)
    everystep.save(ram / "model", make_state(1), step=1)
    (ram / "model.partial").symlink_to(elsewhere)
    everystep.save(ram / "model", make_state(1, 1), step=1, overwrite=True)
    run = ram / "run"
    run.mkdir()
    (run / f"{step_name(1)}.partial").symlink_to(elsewhere)
    (run / f"{step_name(7)}.retired").symlink_to(elsewhere)
    with everystep.Checkpointer(run, make_state(1), keep=KEEP_ONE, mode="sync") as checkpointer:
        checkpointer.save(1)
        (run / f"{step_name(2)}.partial").symlink_to(elsewhere)
        checkpointer.save(2)
        assert checkpointer.steps == [2]
    assert _untouched(elsewhere)
    assert sorted(os.listdir(ram)) == ["model", "run"]
    assert not leftovers(run)


def test_a_checkpoint_that_is_a_link_is_read_but_not_written_over(ram: Path) -> None:
    run = ram / "run"
    kept = ram / "kept"
    with everystep.Checkpointer(run, make_state(1), keep=KEEP_ONE, mode="sync") as checkpointer:
        checkpointer.save(1)
    os.rename(run / step_name(1), kept)
    (run / step_name(1)).symlink_to(kept)
    state = blank_state()
    with everystep.Checkpointer(run, state, keep=KEEP_ONE, mode="sync") as checkpointer:
        assert checkpointer.restore() == 1
        for step in range(2, 6):
            checkpointer.state = make_state(step)
            checkpointer.save(step)
        assert not (run / step_name(5)).is_symlink()
    assert load_identity(str(kept)) == (1, 0)
    assert load_identity(str(run / step_name(5))) == (5, 0)


def test_a_lock_that_is_a_link_is_refused(ram: Path, elsewhere: Path) -> None:
    run = ram / "run"
    run.mkdir()
    (run / ".lock").symlink_to(elsewhere / "thesis.txt")
    with pytest.raises(everystep.SaveFailed, match=r"\.lock"):
        everystep.Checkpointer(run, make_state(1), mode="sync")
    assert _untouched(elsewhere)


# --- interrupts -----------------------------------------------------------------------------------


# An interrupt that strikes in a destructor is only reported.
struck_anywhere = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGUSR2 is Ctrl-C: other signals belong to the test runner."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupt)
    yield
    signal.signal(signal.SIGUSR2, before)


def _interrupted(work: Callable[[], object], seconds: float) -> bool:
    """Whether the interrupt that comes after so long struck before the work was done."""
    finished = False

    def strike() -> None:
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    striking = threading.Thread(target=strike)
    with contextlib.suppress(KeyboardInterrupt):
        striking.start()
        work()
        finished = True
        striking.join()
    while striking.is_alive():
        with contextlib.suppress(KeyboardInterrupt):
            striking.join()
    return not finished


@struck_anywhere
@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_save_does_not_lock_the_next_one_out(ram: Path) -> None:
    """Ctrl-C at any moment: nothing stays held, no descriptor is lost, and the path can be saved to."""
    rng = np.random.default_rng(3)
    open_before = len(os.listdir("/proc/self/fd"))
    struck = 0
    for number in range(400):
        path = ram / f"model{number % 5}"
        seconds = float(rng.uniform(1e-5, 1e-3))
        struck += _interrupted(
            lambda path=path, number=number: everystep.save(  # type: ignore[misc]
                path, make_state(1, number), step=1, overwrite=True
            ),
            seconds,
        )
        everystep.save(path, make_state(2, number), step=2, overwrite=True)
        assert load_identity(str(path)) == (2, number)
    assert struck > 5
    assert len(os.listdir("/proc/self/fd")) <= open_before + 2


@struck_anywhere
@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_checkpointer_gives_up_its_run(ram: Path) -> None:
    rng = np.random.default_rng(4)
    struck = 0

    def train(run: Path) -> None:
        with everystep.Checkpointer(
            run, make_state(1), keep=KEEP_ONE, mode="sync", preemption=False, start_over=True
        ) as found:
            for step in range(1, 4):
                found.state = make_state(step)
                found.save(step)

    for number in range(150):
        run = ram / f"run{number % 5}"
        struck += _interrupted(lambda run=run: train(run), float(rng.uniform(1e-5, 2e-3)))  # type: ignore[misc]
        gc.collect()
        train(run)
        assert load_identity(str(run)) == (3, 0)
    assert struck > 5


def test_copying_a_run_in_the_writers_process_does_not_drop_its_lock(ram: Path, tmp_path: Path) -> None:
    run = ram / "run"
    with everystep.Checkpointer(run, make_state(1), mode="sync") as checkpointer:
        checkpointer.save(1)
        shutil.copytree(run, tmp_path / "copy")
        with forked(hold_run(run)) as other:
            assert other.wait() == 1  # still locked
        checkpointer.save(2)


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit on threads is another user's, whom only root can be")
@pytest.mark.parametrize("backend", ["threads", "uring", "buffered"])
def test_a_process_that_gets_no_threads_fails_to_save_and_lives(tmp_path: Path, backend: Backend) -> None:
    room = tmp_path / "room"
    room.mkdir()
    os.chmod(room, 0o777)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
            os.chmod(folder, folder.stat().st_mode | 0o011)
    state = {"w": np.zeros(1 << 20)}
    everystep.save(room / "warm", state, options=everystep.Options(backend=backend))

    def child(pipe: Pipe) -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        os.setresuid(54321, 54321, 54321)
        try:
            everystep.save(room / "other", state, options=everystep.Options(backend=backend))
            pipe.send("saved")
        except everystep.SaveFailed as error:
            pipe.send(error.errno)

    with forked(child) as process:
        assert process.pipe.receive() == errno.EAGAIN
        assert process.wait() == 0
    assert sorted(os.listdir(room)) == ["warm"]


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", ["later", "now"])
def test_a_reader_goes_on_when_its_checkpoint_is_retired(
    ram: Path, spare: str, request: pytest.FixtureRequest
) -> None:
    """Many saves retire and recycle others; what a reader has open is not written over, and not torn away."""
    if spare == "now":
        request.getfixturevalue("spare_now")
    run = ram / "run"
    with everystep.Checkpointer(run, make_state(1), keep=KEEP_ONE, mode="sync") as checkpointer:
        checkpointer.save(1)
        reader = everystep.open(run / step_name(1))
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
        # Once no reader has it open, it goes: a long training must not fill the disk.
        assert f"{step_name(1)}.retired" not in leftovers(run)
    assert leftovers(run) == []


def test_a_reader_in_another_process_goes_on_too(ram: Path) -> None:
    run = ram / "run"

    def read(pipe: Pipe) -> None:
        with everystep.open(run / step_name(1)) as reader:
            pipe.send("open")
            stop_here()
            pipe.send(identify(reader.load()))

    with everystep.Checkpointer(run, make_state(1), keep=KEEP_ONE, mode="sync") as checkpointer:
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
    monkeypatch.setattr("everystep.store.read.reader_lock.LOCK_SECONDS", SECONDS)
    path = ram / "model"
    everystep.save(path, make_state(1, 0), step=1)
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
            everystep.save(path, make_state(1, version), step=1, overwrite=True)
        assert reader.pipe.receive() > 1  # versions; else the two did not meet
        assert reader.wait() == 0


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


# --- forks while a save is under way --------------------------------------------------------------


def test_forks_during_saves_harm_neither_side(tmp_path: Path, way: everystep.Options) -> None:
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
        with everystep.Checkpointer(
            run, state, keep=everystep.Keep(last=2), options=way, mode="sync"
        ) as checkpointer:
            step = 0
            while step < 12 or forks <= 3:  # a fast disk and a busy machine: the two have to meet
                step += 1
                state.update(make_state(step, 0, wide))
                checkpointer.save(step)
                assert identify(everystep.load(run / step_name(step))) == (step, 0)
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
        everystep.save(ram / "model", make_state(1), step=1)
        monkeypatch.undo()
        assert load_identity(str(ram / "model")) == (1, 0)
        everystep.save(ram / "model", make_state(2), step=2, overwrite=True)
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
        checkpointer = everystep.Checkpointer(run, make_state(1), mode="sync")
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
            with everystep.Checkpointer(run, target, mode="sync") as checkpointer:
                assert checkpointer.restore() == 1
                assert leftovers(run) == []
                checkpointer.state = make_state(2, 1)
                checkpointer.save(2)
            assert load_identity(str(run)) == (2, 1)
        finally:
            os.kill(worker, signal.SIGKILL)
