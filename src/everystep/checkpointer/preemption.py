"""Being asked to stop by SIGTERM or SIGUSR1, which schedulers send before they take a machine away.

The first signal is only remembered, for the whole process. Training finishes its step, the next
`Checkpointer.save` saves it whatever the schedule says, and the process ends. With several ranks the
coordinator decides for all (`PreemptionDuty`). With several Checkpointers the process ends when each has
saved, or when the first of them saves again, with the highest of their exit codes. Then the signal is
answered: a process that goes on nevertheless, such as a notebook, is not asked to end any more. A second
signal does what it would do without Everystep, unless it follows at once. Handlers that other code has
installed stay.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType

from everystep.checkpointer.schedule import Schedule
from everystep.store import RankGroup, SaveRound

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SECONDS = 5.0
"""A signal within this time of the first, or of its answer, is no second one: where a scheduler signals every
process of a job, a launcher such as torchrun, which gets it too, hands it on to those that have it already,
and may be ending by it."""


class Preemption:
    """One listener, from construction to `close`; all listeners of a process hear the same signal.

    A signal that came before this one was made, and was not answered, counts as well.
    """

    def __init__(self, exit_code: int = 0) -> None:
        self._exit_code = exit_code
        self._obeyed = False
        if _in_main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, _handle)
        _listening.add(self)

    @property
    def received(self) -> str | None:
        """The name of the signal that asked to stop, if one did."""
        return None if _note is None else _note.name

    def obeyed(self, *, at_once: bool) -> int | None:
        """What this listener had to save is safe. The exit code, or None where others have to save first.

        `at_once`: whatever others have to save.
        """
        global _note, _asked
        again, self._obeyed = self._obeyed, True
        ends = at_once or again or all(listener._obeyed for listener in _listening)
        if not ends:
            return None
        _note, _asked = None, time.monotonic()
        return max(listener._exit_code for listener in (self, *_listening))

    def close(self) -> None:
        _listening.discard(self)
        # One that ends because it was asked to is not killed by what asks it again.
        if not _listening and (_note is not None or not _just_asked()):
            _stop_handling()


_listening: weakref.WeakSet[Preemption] = weakref.WeakSet()
_note: signal.Signals | None = None
"""The signal that came first, until it is answered."""
_asked = -math.inf
"""When it came, or was answered."""


def _just_asked() -> bool:
    return time.monotonic() - _asked < SAME_SECONDS


def _handle(number: int, frame: FrameType | None) -> None:
    global _note, _asked
    if _just_asked():
        return
    if _listening and _note is None:
        _note, _asked = signal.Signals(number), time.monotonic()
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _stop_handling() -> None:
    """Only the main thread can change handlers. Elsewhere `_handle` stays, and finds no listener."""
    if _in_main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is _handle:
                signal.signal(number, signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave_to_the_parent() -> None:
    """In a forked child, such as a data loader's worker: signals end it at once, as without Everystep."""
    global _note, _asked
    _note, _asked = None, -math.inf
    _listening.clear()
    _stop_handling()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class PreemptionDuty:
    """The decisions of one Checkpointer. Without `listens`, it does not handle signals."""

    def __init__(self, group: RankGroup, schedule: Schedule, exit_code: int, *, listens: bool) -> None:
        self._group = group
        self._schedule = schedule
        self._exit_code = exit_code
        self._preemption = Preemption(exit_code) if listens else None

    @property
    def received(self) -> str | None:
        """The name of the signal that asked this process to end, if one did."""
        return None if self._preemption is None else self._preemption.received

    def decide(self, step: int, now: float) -> tuple[bool, str | None, SaveRound | None]:
        """Whether this call of `save` saves; the signal after which the process then ends, if any; and the
        ranks' messages about this save."""
        group, signal = self._group, self.received
        if not group.has_others:
            return signal is not None or self._schedule.due(step, now), signal, None
        if group.is_coordinator:
            signal = signal or group.signalled()
        elif signal is not None:
            group.signal(signal)
        due = group.is_coordinator and (signal is not None or self._schedule.due(step, now))
        save_round = group.begin("the Checkpointer's save", step, due=due, signal=signal)
        assert save_round is not None
        return save_round.call.due, save_round.call.signal, save_round

    def fulfilled(self, run: str, step: int, signal: str) -> int | None:
        """Called when that step is durable. Returns the exit code to end with; None: others save first."""
        code: int | None = self._exit_code
        if self._preemption is not None:
            # Several ranks end at the same step, whatever other Checkpointers one of them has.
            code = self._preemption.obeyed(at_once=self._group.has_others)
        if self._group.is_coordinator:
            _print_preempted(run, step, signal, code)
        return code

    def close(self) -> None:
        """From now on signals do what they would do without Everystep."""
        if self._preemption is not None:
            self._preemption.close()


def checked_exit_code(code: object) -> int:
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255:
        raise ValueError(f"preemption_exit_code must be an int from 0 to 255, not {code!r}")
    return code


def _print_preempted(run: str, step: int, signal: str, code: int | None) -> None:
    """Says why the process ends without an error."""
    then = (
        "the process ends when its other Checkpointers have saved"
        if code is None
        else f"the process ends with exit code {code}. Start the same command again to go on from there"
    )
    print(
        f"everystep: {signal} received: step {step} is saved in {run}; {then}.", file=sys.stderr, flush=True
    )
