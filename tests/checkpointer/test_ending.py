"""How a training ends while a checkpoint is under way: finished or given up cleanly, never hanging."""

from __future__ import annotations

import signal
import subprocess
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep import Checkpointer, Keep, Options
from everystep.checkpointer import preemption
from everystep.checkpointer.save_task import SaveTask
from everystep.engine import WriteJob, faults
from support.processes import warm_python

TIMEOUT = 240

PRELUDE = """
import os, signal, sys, threading, time
import torch, everystep
from everystep.engine import faults
torch.manual_seed(0)
model = torch.nn.Linear(600, 600)
optimizer = torch.optim.AdamW(model.parameters())
def train():
    optimizer.zero_grad()
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
state = {"model": model, "optimizer": optimizer}
options = everystep.Options(backend="threads", memory_nbytes=2 << 20)
ckpt = everystep.Checkpointer(sys.argv[1], state, options=options)
start = ckpt.restore()
train()
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return warm_python.run(PRELUDE + textwrap.dedent(script), folder, timeout=TIMEOUT)


SLOW = 'faults.install(*faults.parse("write:1:slow100+"))\n'

HELD = """
from everystep.checkpointer.save_task import SaveTask
may_end = threading.Event()
def written(saving, real=SaveTask.written):
    assert may_end.wait(200)
    real(saving)
SaveTask.written = written
"""
"""Saves end when the script says so, however busy the machine is."""

INTERRUPT = """
heard = []
def interrupt(number, frame):
    if not heard:
        heard.append(number)
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
def interrupt_soon():
    while not heard:  # more than once: a signal right before a thread begins to wait does not wake it
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
def interrupted_in(real):
    def call(*arguments):
        if not heard:
            threading.Thread(target=interrupt_soon).start()
        return real(*arguments)
    return call
"""
"""One Ctrl-C, a little after a call has begun that waits."""


def test_the_interpreter_ends_after_the_checkpoint_under_way_is_durable(tmp_path: Path) -> None:
    script = """
    def let_it_end():
        threading.main_thread().join()
        may_end.set()
    threading.Thread(target=let_it_end).start()
    ckpt.save(1)
    assert ckpt.last_durable is None
    """
    done = run(SLOW + HELD + textwrap.dedent(script), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert everystep.open(tmp_path).step == 1


def test_an_exception_in_the_loop_is_what_is_seen_and_the_checkpoint_is_finished(tmp_path: Path) -> None:
    script = """
    with ckpt:
        ckpt.save(1)
        raise RuntimeError("the loss is NaN")
    """
    done = run(SLOW + textwrap.dedent(script), tmp_path)
    assert done.returncode == 1
    assert "the loss is NaN" in done.stderr.splitlines()[-1]
    assert everystep.open(tmp_path).step == 1


def test_an_exception_is_not_hidden_by_a_save_that_fails_too(tmp_path: Path) -> None:
    script = """
    faults.install(*faults.parse("sync:1:EIO+"))
    with ckpt:
        ckpt.save(1)
        raise RuntimeError("the loss is NaN")
    """
    done = run(script, tmp_path)
    assert done.returncode == 1
    assert "the loss is NaN" in done.stderr.splitlines()[-1]
    assert "SaveFailed" in done.stderr


def test_an_interrupt_in_the_loop_finishes_the_checkpoint(tmp_path: Path) -> None:
    script = """
    with ckpt:
        ckpt.save(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    """
    done = run(SLOW + textwrap.dedent(script), tmp_path)
    assert done.returncode == -signal.SIGINT
    assert everystep.open(tmp_path).step == 1


def test_an_interrupt_while_the_step_waits_changes_nothing_of_the_save(tmp_path: Path) -> None:
    script = """
    before = model.weight.detach().clone()
    ckpt.save(1)
    SaveTask.release = interrupted_in(SaveTask.release)
    try:
        train()
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit("it did not wait")
    may_end.set()
    ckpt.close()
    assert torch.equal(everystep.load(sys.argv[1])["model"]["weight"], before)
    """
    slow = SLOW.replace("slow100", "slow400")
    done = run(slow + HELD + INTERRUPT + textwrap.dedent(script), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_the_state_is_still_leaving_gives_that_save_up(tmp_path: Path) -> None:
    """The caller goes on to change what has not been read, so none of it may become a checkpoint."""
    script = """
    state = {"w": torch.zeros(1 << 20)}
    loose = everystep.Checkpointer(sys.argv[1] + "-2", state, mode="snapshot", options=options)
    def leaving(job, nbytes, timeout, real=everystep.engine.WriteJob.wait_for_nbytes):
        while True:  # so slow is the device that the bytes never leave
            real(job, nbytes, 0.05)
            time.sleep(0.01)
    everystep.engine.WriteJob.wait_for_nbytes = interrupted_in(leaving)
    try:
        loose.save(1)
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit("it did not wait")
    state["w"] += 1
    may_end.set()
    try:
        loose.close()
    except everystep.SaveFailed as error:
        assert "interrupted" in str(error), error
    else:
        raise SystemExit("nothing was said")
    assert loose.steps == []
    """
    done = run(SLOW + HELD + INTERRUPT + textwrap.dedent(script), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("workers", [2])
def test_forked_workers_during_a_save_do_no_harm(tmp_path: Path, workers: int) -> None:
    script = f"""
    class Squares(torch.utils.data.Dataset):
        def __len__(self): return 32
        def __getitem__(self, i):
            try:
                ckpt.save(99)
            except RuntimeError as error:
                assert "forked child" in str(error)
            else:
                raise SystemExit("a child may not save")
            train()  # its own copy: no hook waits here
            return i * i
    for step in range(1, 4):
        ckpt.save(step)
        loader = torch.utils.data.DataLoader(
            Squares(), 8, num_workers={workers}, multiprocessing_context="fork"
        )
        assert sum(int(batch.sum()) for batch in loader) == sum(i * i for i in range(32))
        train()
    ckpt.close()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(60)  # all have been told to end, ours and those of the loader
    assert threading.active_count() == 1, threading.enumerate()
    """
    done = run(SLOW.replace("slow100", "slow30") + textwrap.dedent(script), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert everystep.verify(tmp_path).problems == ()


def test_a_forked_child_that_has_its_parents_old_id_is_still_a_child(tmp_path: Path) -> None:
    """Ids are given out again: after the parent has died, a child of a child may get its id."""
    script = """
    torch.set_num_threads(1)  # a forked child has no worker threads
    saving = ckpt.save(1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.getpid = lambda: parent
        code = 1
        try:
            ckpt.save(99)
        except RuntimeError as error:
            train()  # its own copy: no hook waits here
            ckpt.close()
            code = 0 if "forked child" in str(error) else 2
        try:
            saving.result()  # its thread is not in this process
        except RuntimeError as error:
            code = code if "forked child" in str(error) else 3
        else:
            code = 4
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train()
    ckpt.close()
    """
    done = run(SLOW.replace("slow100", "slow30") + textwrap.dedent(script), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert everystep.verify(tmp_path).problems == ()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preemption_finishes_the_step_saves_exits_with_0_and_says_so(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = f"""
    ckpt.close()
    ckpt = everystep.Checkpointer(sys.argv[1], state, every=1000)
    for step in range(1, 100):
        train()
        if step == 3:
            os.kill(os.getpid(), {int(number)})
            assert ckpt.preempted
        ckpt.save(step)
    """
    done = run(script, tmp_path)
    assert done.returncode == 0
    assert done.stderr == (
        f"everystep: {number.name} received: step 3 is saved in {tmp_path}; the process ends with exit code "
        "0. Start the same command again to go on from there.\n"
    )
    assert everystep.open(tmp_path).step == 3
    assert number.name in (tmp_path / "events.jsonl").read_text().splitlines()[-1]


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    script = """
    from everystep.checkpointer import preemption
    os.kill(os.getpid(), signal.SIGTERM)
    preemption.SAME_SECONDS = 0.0  # as if so much time had passed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    """
    assert run(script, tmp_path).returncode == -signal.SIGTERM


@pytest.fixture
def asked() -> Iterator[None]:
    """What a test asks this process to do is forgotten behind it."""
    yield
    preemption._leave_to_the_parent()


def numbers(folder: Path, **arguments: Any) -> Checkpointer:
    return Checkpointer(folder, {"w": np.zeros(3)}, mode="sync", **arguments)


@pytest.mark.usefixtures("asked")
def test_a_signal_that_a_launcher_hands_on_as_well_is_no_second_one(tmp_path: Path) -> None:
    with numbers(tmp_path) as ckpt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            ckpt.save(1)
    assert ended.value.code == 0
    assert ckpt.steps == [1]


def test_a_signal_that_a_launcher_hands_on_to_a_process_that_is_ending_does_not_kill_it(
    tmp_path: Path,
) -> None:
    script = """
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        ckpt.save(1)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
    """
    done = run(script, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)


@pytest.mark.usefixtures("asked")
def test_a_process_that_goes_on_after_its_end_has_done_what_it_was_asked_to(tmp_path: Path) -> None:
    """A notebook, say: the next training in it is not one that was asked to end."""
    with numbers(tmp_path, every=100) as first:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            first.save(1)
    with numbers(tmp_path, every=100) as second:
        second.restore()
        assert not second.preempted
        assert second.save(2) is None


@pytest.mark.usefixtures("asked")
def test_preemption_ends_a_process_of_several_checkpointers_when_each_has_saved(tmp_path: Path) -> None:
    with numbers(tmp_path / "a", every=100) as a, numbers(tmp_path / "b", every=100) as b:
        signal.raise_signal(signal.SIGTERM)
        a.save(7)
        with pytest.raises(SystemExit):
            b.save(7)
    assert (a.steps, b.steps) == ([7], [7])


@pytest.mark.usefixtures("asked")
def test_the_exit_code_of_preemption_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Schedulers take 0 for finished. Of several Checkpointers the highest code counts."""
    with (
        numbers(tmp_path / "a", preemption_exit_code=75) as a,
        numbers(tmp_path / "b", preemption_exit_code=1) as b,
    ):
        signal.raise_signal(signal.SIGTERM)
        a.save(7)
        said = capsys.readouterr().err
        assert f"step 7 is saved in {tmp_path / 'a'}" in said
        assert "when its other Checkpointers have saved" in said
        with pytest.raises(SystemExit) as ended:
            b.save(7)
    assert ended.value.code == 75
    assert "ends with exit code 75. Start the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("code", [-1, 256, True, "1", 2.0, None])
def test_an_exit_code_that_no_process_can_have_is_refused(tmp_path: Path, code: Any) -> None:
    with pytest.raises(ValueError, match="preemption_exit_code must be an int from 0 to 255"):
        numbers(tmp_path / "run", preemption_exit_code=code)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("asked")
def test_preemption_does_not_wait_for_a_checkpointer_that_saves_nothing(tmp_path: Path) -> None:
    with numbers(tmp_path / "a", every=100) as a, numbers(tmp_path / "b", every=100) as b:
        signal.raise_signal(signal.SIGTERM)
        a.save(7)
        with pytest.raises(SystemExit):
            a.save(8)
    assert (a.steps, b.steps) == ([7, 8], [])


@pytest.mark.usefixtures("asked")
def test_a_signal_before_a_checkpointer_is_opened_counts_for_it_too(tmp_path: Path) -> None:
    """Say, after the last save of a training that is followed by another one."""
    with numbers(tmp_path / "a") as first:
        first.save(1)
        signal.raise_signal(signal.SIGTERM)
    with numbers(tmp_path / "b") as second:
        assert second.preempted
        with pytest.raises(SystemExit):
            second.save(1)


@pytest.mark.usefixtures("asked")
def test_a_process_that_could_not_save_does_not_end_as_if_it_had(tmp_path: Path) -> None:
    with numbers(tmp_path, on_error="warn") as ckpt:
        signal.raise_signal(signal.SIGTERM)
        with faults.injected("sync:1:EIO"), pytest.warns(RuntimeWarning, match="SaveFailed"):
            ckpt.save(1)
        with pytest.raises(SystemExit):
            ckpt.save(2)
    assert ckpt.steps == [2]


def test_a_checkpointer_of_another_thread_does_not_keep_signals_from_being_heard(tmp_path: Path) -> None:
    opened: list[Checkpointer] = []
    thread = threading.Thread(target=lambda: opened.append(numbers(tmp_path / "a")))
    thread.start()
    thread.join()
    with opened[0], numbers(tmp_path / "b"):
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_with_another_handler_is_left_to_it(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with Checkpointer(tmp_path, {"w": np.zeros(3)}, mode="sync") as ckpt:
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
            assert not ckpt.preempted
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_preemption_no_handler_is_installed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"w": np.zeros(3)}, preemption=False):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- a device that fails or crawls --------------------------------------------------------------------------


def training(folder: Path, **arguments: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Checkpointer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(backend="threads", memory_nbytes=2 << 20)
    state = {"model": model, "optimizer": optimizer}
    return model, optimizer, Checkpointer(folder, state, keep=Keep(last=99), options=options, **arguments)


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("fault", ["write:3:EIO", "sync:3:EIO", "rename:3:EIO", "any:12:ENOSPC"])
def test_a_failure_in_the_background_is_raised_once_and_training_goes_on(tmp_path: Path, fault: str) -> None:
    model, optimizer, ckpt = training(tmp_path)
    told: list[everystep.SaveFailed] = []
    with ckpt, faults.injected(fault):
        for step in range(1, 7):
            step_of(model, optimizer)
            try:
                ckpt.save(step)
            except everystep.SaveFailed as error:
                told.append(error)
        try:
            ckpt.wait()
        except everystep.SaveFailed as error:
            told.append(error)
    assert len(told) == 1
    assert isinstance(told[0].__cause__, OSError)
    failed = [event.step for event in ckpt.events if type(event).__name__ == "Failed"]
    assert ckpt.steps == [step for step in range(1, 7) if step not in failed]
    assert len(failed) == 1
    assert all(everystep.verify(tmp_path / f"step-{step:012d}").problems == () for step in ckpt.steps)


def test_every_failed_save_raises_and_the_last_durable_one_stays(tmp_path: Path) -> None:
    model, optimizer, ckpt = training(tmp_path, on_error="warn")
    ckpt.save(1)
    ckpt.wait()
    with faults.injected("sync:1:EIO+"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2, 6):
            step_of(model, optimizer)
            ckpt.save(step)
        ckpt.wait()
    assert len(told) == 4
    for step, warning in zip(range(2, 6), told, strict=True):
        assert "SaveFailed" in str(warning.message)
        assert f"step-{step:012d}" in str(warning.message)
    assert (ckpt.last_durable, ckpt.steps) == (1, [1])
    ckpt.save(6)
    ckpt.close()
    assert ckpt.steps == [1, 6]


def hold(patch: pytest.MonkeyPatch) -> threading.Event:
    """No byte is seen to leave memory, and no save ends, before the event, however busy the machine is."""
    opened, written, wait_for_nbytes = threading.Event(), SaveTask.written, WriteJob.wait_for_nbytes

    def ending(saving: SaveTask) -> None:
        assert opened.wait(TIMEOUT)
        written(saving)

    def leaving(job: WriteJob, nbytes: int, timeout: float | None = None) -> bool:
        return opened.wait(timeout) and wait_for_nbytes(job, nbytes, timeout)

    patch.setattr(SaveTask, "written", ending)
    patch.setattr(WriteJob, "wait_for_nbytes", leaving)
    return opened


def test_a_device_that_slows_down_holds_training_up_no_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = hold(monkeypatch)
    model, optimizer, ckpt = training(tmp_path, timeout=0.2)
    step_of(model, optimizer)
    before = model.weight.detach().clone()
    with faults.injected("write:1:slow1500"):
        ckpt.save(1)
        step_of(model, optimizer)
        assert not torch.equal(model.weight, before)  # it went on
        with pytest.raises(everystep.errors.DeviceTimeout, match="step 2 was not saved: the save of step 1"):
            ckpt.save(2)
        opened.set()
        deadline = time.monotonic() + TIMEOUT
        while "idle" not in ckpt.progress():
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
    ckpt._timeout = ckpt._group.timeout = TIMEOUT  # from here on nothing is slow but the machine
    with pytest.raises(
        everystep.errors.DeviceTimeout, match=r"step 1 was abandoned: its bytes had not left memory"
    ):
        ckpt.save(3)
    ckpt.close()
    assert ckpt.steps == [3]
    assert torch.equal(everystep.load(tmp_path)["model"]["weight"], model.weight)


def test_waiting_has_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = hold(monkeypatch)
    _, _, ckpt = training(tmp_path)
    with faults.injected("write:1:slow500"), ckpt:
        saving = ckpt.save(1)
        assert saving is not None
        with pytest.raises(everystep.errors.EngineTimeout, match="step 1 was not durable within"):
            ckpt.wait(timeout=0.05)
        opened.set()
        assert saving.result().step == 1


# In "snapshot" the commit is started as in "overlap".
@pytest.mark.parametrize("mode", ["overlap", pytest.param("snapshot", marks=pytest.mark.slow), "sync"])
def test_a_save_in_the_interpreters_last_moments_is_made(tmp_path: Path, mode: str) -> None:
    """The interpreter no longer waits for threads that start now."""
    script = f"""
        import atexit
        ckpt.close()
        last = everystep.Checkpointer(sys.argv[1], state, mode={mode!r}, options=options)
        atexit.register(lambda: last.save(7))
        """
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert everystep.verify(tmp_path / "step-000000000007").intact


def test_a_run_that_could_not_be_closed_in_time_is_given_up_by_another_call(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, {"w": np.ones(10)}, mode="snapshot", timeout=0.1)
    with faults.injected("sync:1:slow1500"):
        saving = checkpointer.save(1)
        assert saving is not None
        with pytest.raises(everystep.SaveFailed, match="still under way"):
            checkpointer.close()
        with pytest.raises(everystep.errors.Locked):
            Checkpointer(tmp_path, {"w": np.ones(10)}, mode="sync")
        assert saving.exception(60.0) is None
    checkpointer.close()
    with Checkpointer(tmp_path, {"w": np.zeros(10)}, mode="sync") as again:
        assert again.restore() == 1
