"""SIGKILL at every system call of a training that saves: the run recovers, and goes on."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import everystep
from crash.conftest import USABLE, WAYS
from everystep.engine import faults
from support.crashes.recovery import Begun, Durable, Ledger, PathRecovery, Recovery, RunRecovery, WentBack
from support.processes.child_processes import Pipe, forked
from support.states.identified_states import WIDE, blank_state, make_state

Record = Callable[[str, object], None]

SAVES = [(1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0), (5, 1)]
"""Steps and versions: new ones, replaced ones, and from the third on others retired and recycled."""


def train(
    pipe: Pipe,
    root: Path,
    options: everystep.Options,
    fault: str,
    wide: int = WIDE,
    saves: Sequence[tuple[int, int]] = SAVES,
) -> None:
    """Saves in a run, and tells of each save before it begins and when it is durable."""
    faults.install(*faults.parse(fault))
    checkpointer = everystep.Checkpointer(
        root / "run", None, keep=everystep.Keep(last=2), options=options, mode="sync"
    )
    for step, version in saves:
        checkpointer.state = make_state(step, version, wide)
        pipe.send(Begun(step, version))
        checkpointer.save(step)
        pipe.send(Durable(step, version))
    checkpointer.close()


def replace(pipe: Pipe, root: Path, options: everystep.Options, fault: str) -> None:
    """Saves to one path, over and over."""
    faults.install(*faults.parse(fault))
    for version in range(3):
        pipe.send(Begun(1, version))
        everystep.save(root / "model", make_state(1, version), step=1, overwrite=True, options=options)
        pipe.send(Durable(1, version))


def kill_at_each_call(
    root: Path, work: Callable[[Pipe, Path, int], None], recovery: Recovery
) -> tuple[int, Ledger]:
    """Runs `work` in child after child, each killed one call later, until one gets through."""
    nth = 0
    while True:
        nth += 1
        place = root / str(nth)
        place.mkdir()
        with forked(work, place, nth) as child:
            ledger = Ledger()
            for mark in child.pipe.drain():
                ledger.note(mark)
            code = child.wait()
        recovery.check(place, ledger, thorough=True)
        if code == 0:
            return nth - 1, ledger
        assert code == -signal.SIGKILL
        shutil.rmtree(place)


def test_killed_at_each_call_of_a_training(
    fast: Path, way: everystep.Options, record_property: Record
) -> None:
    killed, ledger = kill_at_each_call(
        fast, lambda pipe, place, nth: train(pipe, place, way, f"any:{nth}:kill"), RunRecovery()
    )
    assert killed > 60
    assert ledger.floor == SAVES[-1][0]
    record_property("crash-kills", killed)


def go_back(pipe: Pipe, root: Path, options: everystep.Options, fault: str) -> None:
    """Goes back two steps, and on from there; the fault is in what comes after that."""
    keep = everystep.Keep(last=3)
    checkpointer = everystep.Checkpointer(root / "run", None, keep=keep, options=options, mode="sync")
    for step in (1, 2, 3, 4):
        checkpointer.state = make_state(step)
        pipe.send(Begun(step))
        checkpointer.save(step)
        pipe.send(Durable(step))
    checkpointer.state = blank_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        checkpointer.restore(2)
    pipe.send(WentBack(2))
    faults.install(*faults.parse(fault))
    for step in (3, 5):
        checkpointer.state = make_state(step, 1)
        pipe.send(Begun(step, 1))
        checkpointer.save(step)
        pipe.send(Durable(step, 1))
    checkpointer.close()


def test_killed_at_each_call_after_going_back(
    fast: Path, way: everystep.Options, record_property: Record
) -> None:
    killed, ledger = kill_at_each_call(
        fast, lambda pipe, place, nth: go_back(pipe, place, way, f"any:{nth}:kill"), RunRecovery()
    )
    assert killed > 20
    assert ledger.durable == {1: 0, 2: 0, 3: 1, 5: 1}
    record_property("crash-kills", killed)


@pytest.mark.usefixtures("spare_now")
def test_killed_at_each_call_of_a_training_that_recycles_at_once(fast: Path, record_property: Record) -> None:
    options = WAYS[USABLE[0]]
    killed, _ = kill_at_each_call(
        fast, lambda pipe, place, nth: train(pipe, place, options, f"any:{nth}:kill"), RunRecovery()
    )
    assert killed > 60
    record_property("crash-kills", killed)


def test_killed_at_each_call_while_a_path_is_replaced(
    fast: Path, way: everystep.Options, record_property: Record
) -> None:
    killed, ledger = kill_at_each_call(
        fast, lambda pipe, place, nth: replace(pipe, place, way, f"any:{nth}:kill"), PathRecovery()
    )
    assert killed > 25
    assert ledger.durable == {1: 2}
    record_property("crash-kills", killed)


def test_killed_at_each_transfer_of_a_large_state(
    tmp_path: Path, way: everystep.Options, record_property: Record
) -> None:
    """On a real device, with several windows under way."""
    wide = 100_000
    options = dataclasses.replace(way, memory_nbytes=128 << 10, small_nbytes=0)
    killed, _ = kill_at_each_call(
        tmp_path,
        lambda pipe, place, nth: train(pipe, place, options, f"write:{nth}:kill", wide, SAVES[:2]),
        RunRecovery(wide=wide),
    )
    assert killed >= 2 * (wide * 4 // (64 << 10))
    record_property("crash-kills", killed)


def open_and_close(pipe: Pipe, run: Path, nth: int) -> None:
    faults.install(faults.Fault("any", nth, "kill"))
    everystep.Checkpointer(run, None, mode="sync").close()


def test_killed_while_it_sweeps(fast: Path, record_property: Record) -> None:
    """Recovery itself, killed at each call, leaves what the next recovery can use."""
    nth = 0
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        nth += 1
        place = fast / str(nth)
        place.mkdir()
        with forked(train, place, everystep.Options(), "write:4:kill") as child:
            ledger = Ledger()
            for mark in child.pipe.drain():
                ledger.note(mark)
            assert child.wait() == -signal.SIGKILL

        assert any(name.endswith(".partial") for name in os.listdir(place / "run"))
        with forked(open_and_close, place / "run", nth) as child:
            code = child.wait()
        RunRecovery().check(place, ledger, thorough=True)
    assert code == 0
    assert nth > 3
    record_property("crash-kills", nth - 1)
