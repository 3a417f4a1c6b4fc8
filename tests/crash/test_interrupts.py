"""Ctrl-C at every spot of a save at which Python hears it: nothing stays held, even if its traceback is kept.

A notebook keeps the traceback of the last error, and with it all that its frames refer to. So what a save
holds must be given up by the save, not by a destructor: a recycled file that stays open with its lease, or a
directory that stays locked, would let the next reader wait.
"""

from __future__ import annotations

import dis
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

import everystep
from crash.conftest import WAYS
from everystep.checkpointer.save_task import SaveTask
from support.states.identified_states import load_identity, make_state

# Where CPython looks for signals: behind calls, at the beginning of a function, and in loops.
_HEARD_BEHIND = {
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))
}
_WHERE = tuple(os.path.join(os.path.dirname(everystep.__file__), layer, "") for layer in ("store", "engine"))


class Interrupt:
    """Raises `KeyboardInterrupt` at the n-th spot of the store or the engine."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.where = ""
        self._codes: dict[CodeType, bytes] = {}
        self._before: dict[int, int | None] = {}

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        if not frame.f_code.co_filename.startswith(_WHERE):
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._before[id(frame)] = None
        elif event == "opcode":
            code = self._codes.setdefault(frame.f_code, frame.f_code.co_code)
            before, self._before[id(frame)] = self._before[id(frame)], code[frame.f_lasti]
            # What a signal raises belongs to the call, what this raises to the instruction behind it: with
            # ``try: return call()``, that one is outside.
            if before in _HEARD_BEHIND and code[frame.f_lasti] != dis.opmap["RETURN_VALUE"]:
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
                    raise KeyboardInterrupt
        return self._trace


def leased() -> Iterator[str]:
    """The files that this process has a lease on."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if fcntl.fcntl(int(name), fcntl.F_GETLEASE) != fcntl.F_UNLCK:
                yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself


# The interrupted retirement is made good by the next save, which finds it done in part.
@pytest.mark.filterwarnings("ignore:.*could not be removed:RuntimeWarning")
@pytest.mark.parametrize("how", ["small", "buffered"])
def test_an_interrupt_anywhere_in_a_save_leaves_no_lease_and_no_lock(
    ram: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everystep.store.read.reader_lock.LOCK_SECONDS", 0.0)  # a reader who would wait fails
    # As in an interpreter that ends, and as `everystep.save` does: on the thread in which handlers run.
    monkeypatch.setattr(SaveTask, "_start_thread", lambda task: False)
    run, nth, leases_seen = ram / "run", 0, 0
    with everystep.Checkpointer(
        run,
        make_state(1),
        keep=everystep.Keep(last=1),
        mode="sync",
        preemption=False,
        options=WAYS[how],
    ) as checkpointer:
        step = 0
        struck = True
        while struck:
            for _ in range(3):  # until there is a file to write over
                step += 1
                checkpointer.state = make_state(step)
                checkpointer.save(step)
            nth += 1
            step += 1
            checkpointer.state = make_state(step)
            kept: BaseException | None = None
            interrupt = Interrupt(nth)
            try:
                with interrupt:
                    checkpointer.save(step).result()
            except KeyboardInterrupt as error:
                kept = error  # with its traceback, and all that its frames hold
            struck = bool(interrupt.where)
            leases_seen += _leases_in(kept)
            assert list(leased()) == [], interrupt.where
            found = load_identity(str(run))[0]
            assert found in (step - 1, step), interrupt.where
    assert nth > 100
    assert leases_seen > 0, "no interrupt struck while a file was open for writing over"


def _leases_in(error: BaseException | None) -> int:
    """How many frames of a traceback refer to a file that was opened and not yet synced."""
    count, trace = 0, error.__traceback__ if error is not None else None
    while trace is not None:
        count += any(name in trace.tb_frame.f_locals for name in ("file", "manifest", "job"))
        trace = trace.tb_next
    return count
