"""Sequences of saves as a training makes them, recorded with what the training was told."""

from __future__ import annotations

import warnings
from pathlib import Path

import everystep
from everystep.engine import faults
from everystep.store import step_name
from support.crashes.crash_tracing import Recording
from support.crashes.recovery import Begun, Damaged, Durable, WentBack
from support.states.identified_states import WIDE, blank_state, make_state

KEEP = everystep.Keep(last=2)
SHARD = "r00000.v0.safetensors"


def open_run(
    recording: Recording, state: object, options: everystep.Options, keep: everystep.Keep = KEEP
) -> everystep.Checkpointer:
    with recording.tracing():
        return everystep.Checkpointer(recording.root / "run", state, keep=keep, options=options, mode="sync")


def save(
    recording: Recording, checkpointer: everystep.Checkpointer, step: int, version: int = 0, fault: str = ""
) -> bool:
    """One save with its marks; False when it failed, in a way it may."""
    checkpointer.state = make_state(step, version, recording.wide)
    recording.mark(Begun(step, version))
    try:
        with recording.tracing(), faults.injected(fault), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                checkpointer.save(step)
            finally:
                recording.calls = faults.count_calls()
    except everystep.SaveFailed:
        return False
    recording.mark(Durable(step, version))
    return True


def close(recording: Recording, checkpointer: everystep.Checkpointer) -> None:
    with recording.tracing():
        checkpointer.close()


def steady(root: Path, options: everystep.Options, saves: int = 6, wide: int = WIDE) -> Recording:
    """A new run; after the third save every one retires a checkpoint and writes over another's files."""
    recording = Recording(root, wide)
    checkpointer = open_run(recording, None, options)
    for step in range(1, saves + 1):
        save(recording, checkpointer, step)
    close(recording, checkpointer)
    return recording


def same_steps_again(root: Path, options: everystep.Options) -> Recording:
    """Steps that are saved a second time replace the first, with and without a spare to write over."""
    return _saves(root, options, [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1)])


def brief(root: Path, options: everystep.Options) -> Recording:
    """A little of everything: a new run, a step replaced, one retired."""
    return _saves(root, options, [(1, 0), (2, 0), (2, 1), (3, 0)])


def _saves(root: Path, options: everystep.Options, saves: list[tuple[int, int]]) -> Recording:
    recording = Recording(root)
    checkpointer = open_run(recording, None, options)
    for step, version in saves:
        save(recording, checkpointer, step, version)
    close(recording, checkpointer)
    return recording


def after_damage(root: Path, options: everystep.Options) -> Recording:
    """The newest checkpoint turns out damaged; training falls back, and saves that step and others again."""
    recording = Recording(root)
    checkpointer = open_run(recording, None, options)
    for step in (1, 2, 3):
        save(recording, checkpointer, step)
    close(recording, checkpointer)
    recording.mark(Damaged(3))
    damage(recording, root / "run" / step_name(3) / SHARD, offset=4500)
    checkpointer = open_run(recording, blank_state(), options)
    with recording.tracing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert checkpointer.restore() == 2
    for step in (3, 4, 5):
        save(recording, checkpointer, step, 1)
    close(recording, checkpointer)
    return recording


def going_back(root: Path, options: everystep.Options) -> Recording:
    """Training goes back two steps; the first is saved again, and then one that it had not come to."""
    recording = Recording(root)
    checkpointer = open_run(recording, None, options, everystep.Keep(last=3))
    for step in (1, 2, 3, 4):
        save(recording, checkpointer, step)
    checkpointer.state = blank_state()
    recording.start = len(recording.items)
    with recording.tracing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert checkpointer.restore(2) == 2
    recording.mark(WentBack(2))
    for step in (3, 5):
        save(recording, checkpointer, step, 1)
    close(recording, checkpointer)
    return recording


def damage(recording: Recording, path: Path, offset: int) -> None:
    """Flips a bit where it lies. For the model that is a write that was synced."""
    with open(path, "r+b") as file:
        file.seek(offset)
        flipped = bytes([file.read(1)[0] ^ 1])
        file.seek(offset)
        file.write(flipped)
    where = str(path)
    recording.items += [
        faults.TracedCall("open", where, "", 0, 0, b"", False),
        faults.TracedCall("write", where, "", offset, 1, flipped, False),
        faults.TracedCall("sync", where, "", 0, 0, b"", False),
    ]


def second_life(recording: Recording, options: everystep.Options) -> None:
    """Whatever is at the recording's root: a new process restores from it and goes on."""
    checkpointer = open_run(recording, blank_state(), options)
    with recording.tracing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        restored = checkpointer.restore()
    save(recording, checkpointer, restored + 1, 7)
    close(recording, checkpointer)


def replaced_path(root: Path, options: everystep.Options) -> Recording:
    """One path, saved over and over with ``overwrite=True``."""
    recording = Recording(root)
    for version in range(4):
        recording.mark(Begun(1, version))
        with recording.tracing():
            everystep.save(
                root / "model", make_state(1, version), step=1, overwrite=version > 0, options=options
            )
        recording.mark(Durable(1, version))
    return recording


def with_failing_call(root: Path, options: everystep.Options, fault: str) -> Recording:
    """A save fails, or survives, the fault; training goes on and saves it again."""
    recording = Recording(root)
    checkpointer = open_run(recording, None, options)
    for step in (1, 2, 3):
        save(recording, checkpointer, step)
    recording.start = len(recording.items)
    save(recording, checkpointer, 3, 1, fault)
    calls = recording.calls
    save(recording, checkpointer, 3, 2)
    close(recording, checkpointer)
    recording.calls = calls
    return recording
