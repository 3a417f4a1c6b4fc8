"""Being asked to stop: SIGTERM and SIGUSR1, as schedulers send them before they take a machine away.

The first signal only leaves a note: the step under way is finished, and the next `Checkpointer.save` saves
it whatever the schedule says, and ends the process with exit code 0. A second signal does what it would have
done without Holdfast. Handlers that somebody else has installed are left alone.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """One listener, from construction to `close`; all listeners of a process hear the same signal."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        if not _listening and _in_main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, _handle)
        _listening.add(self)

    @property
    def received(self) -> str | None:
        """The name of the signal that asked to stop, if one did."""
        return None if self._received is None else self._received.name

    def note(self, number: int) -> None:
        self._received = signal.Signals(number)

    def close(self) -> None:
        _listening.discard(self)
        if not _listening:
            _stop_handling()


_listening: weakref.WeakSet[Preemption] = weakref.WeakSet()


def _handle(number: int, frame: FrameType | None) -> None:
    listening = [listener for listener in _listening if listener.received is None]
    for listener in listening:
        listener.note(number)
    if not listening:  # it is the second one, or nobody is there to act on it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _stop_handling() -> None:
    """Outside of the main thread nothing can be changed; then `_handle` finds nobody to tell."""
    if _in_main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is _handle:
                signal.signal(number, signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave_to_the_parent() -> None:
    """In a forked child, a data loader's worker say: it ends when it is told to."""
    _listening.clear()
    _stop_handling()


os.register_at_fork(after_in_child=_leave_to_the_parent)
