"""What `save` returns behaves like a future: done, result, exception, time-outs, errors after a fork."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import everystep
from everystep import Checkpointer
from everystep.checkpointer.save_task import SaveTask
from everystep.engine import faults

PATIENCE = 120.0


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path, {"w": np.arange(1000.0)}, mode="snapshot") as opened:
        yield opened


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No save ends before the event."""
    opened, committing = threading.Event(), SaveTask.committing

    def hold(task: SaveTask) -> None:
        assert opened.wait(PATIENCE)
        committing(task)

    monkeypatch.setattr(SaveTask, "committing", hold)
    yield opened
    opened.set()


def started(ckpt: Checkpointer, step: int) -> everystep.PendingSave:
    pending = ckpt.save(step)
    assert pending is not None
    return pending


def test_a_durable_save_has_a_result_and_no_exception(ckpt: Checkpointer) -> None:
    pending = started(ckpt, 1)
    info = pending.result(PATIENCE)
    assert (info.step, info.path) == (1, str(Path(ckpt.path) / "step-000000000001"))
    assert pending.done()
    assert pending.exception() is None
    assert pending.result() is info


def test_a_save_under_way_is_not_done_and_a_timeout_is_a_timeout_error(
    ckpt: Checkpointer, held: threading.Event
) -> None:
    pending = started(ckpt, 1)
    assert not pending.done()
    for wait in (pending.result, pending.exception):
        with pytest.raises(
            TimeoutError, match=r"step 1 was not durable within 0\.01 s; its save goes on"
        ) as caught:
            wait(0.01)
        assert isinstance(caught.value, everystep.EverystepError)
    held.set()
    assert pending.result(PATIENCE).step == 1


def test_every_result_of_a_failed_save_raises_its_error_and_the_next_call_does_not(
    ckpt: Checkpointer,
) -> None:
    with faults.injected("sync:1:EIO"):
        pending = started(ckpt, 1)
        errors = []
        for _ in range(2):
            with pytest.raises(everystep.SaveFailed) as caught:
                pending.result(PATIENCE)
            errors.append(caught.value)
    assert errors[0] is errors[1]
    assert pending.done()
    ckpt.save(2)
    ckpt.wait()
    assert ckpt.steps == [2]


def test_an_exception_that_was_asked_for_is_not_raised_again(ckpt: Checkpointer) -> None:
    with faults.injected("sync:1:EIO"):
        error = started(ckpt, 1).exception(PATIENCE)
    assert isinstance(error, everystep.SaveFailed)
    ckpt.wait()


def test_an_error_that_the_next_call_raised_stays_in_the_pending_save(ckpt: Checkpointer) -> None:
    with faults.injected("sync:1:EIO"):
        pending = started(ckpt, 1)
        with pytest.raises(everystep.SaveFailed) as caught:
            ckpt.wait()
    assert pending.exception() is caught.value


def test_asking_in_a_forked_child_is_an_error_and_does_not_hang(
    ckpt: Checkpointer, held: threading.Event
) -> None:
    pending = started(ckpt, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for ask in (pending.done, pending.result, pending.exception):
            try:
                ask()
            except RuntimeError as error:
                said.append(str(error))
        os.write(writing, "\n".join([*said, repr(pending)]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        *errors, described = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(errors) == 3
    assert all(
        f"belongs to process {os.getpid()}, of which this is a forked child" in said for said in errors
    )
    assert described == "<save of step 1, under way>"
    held.set()
    assert pending.result(PATIENCE).step == 1


def test_a_save_interrupted_before_its_thread_runs_is_over_at_once(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(task: SaveTask) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SaveTask, "_start_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1)
    task = ckpt._task
    assert task is not None
    assert isinstance(task.pending.exception(0.0), everystep.SaveFailed)
    task.run()  # a thread that begins late finds the save over
    assert started(ckpt, 2).result(PATIENCE).step == 2
    assert ckpt.steps == [2]


def test_a_save_that_failed_keeps_no_reference_to_the_state(tmp_path: Path) -> None:
    array = everystep.stable(np.ones(300_000))  # too large for the short cut of small states
    alive = weakref.ref(array)
    with Checkpointer(tmp_path) as ckpt:
        with faults.injected("open:1:EIO+"):
            pending = ckpt.save(1, {"w": array})
            assert pending is not None
            error = pending.exception(PATIENCE)
        assert isinstance(error, everystep.SaveFailed)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        del array
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("mode", ["sync", "snapshot", "overlap"])
@pytest.mark.filterwarnings("ignore:the state holds no optimizer")
def test_a_save_that_ended_frees_the_state_without_a_garbage_collection(
    tmp_path: Path, mode: Literal["sync", "snapshot", "overlap"]
) -> None:
    state: dict[str, object] = {"w": np.ones(300_000), "rng": everystep.rng()}
    alive = weakref.ref(state["w"])
    gc.disable()  # TensorFlow and JAX compute into fresh memory until the old one is free
    try:
        with Checkpointer(tmp_path, mode=mode) as ckpt:
            pending = ckpt.save(1, state)
            assert pending is not None
            pending.result(PATIENCE)
            del state["w"]
            assert alive() is None
    finally:
        gc.enable()
