"""Starting threads and waiting for them, in the thread in which signal handlers run.

Python runs a signal handler between two bytecodes of the main thread, and what it raises goes on from there:
`KeyboardInterrupt`, or the `TimeoutError` of an alarm. `threading.Event`, `Condition`, `Semaphore`, futures,
and also `Thread.start`, which waits for an event, are Python code around an inner lock. An exception right
after that lock was taken leaves it locked, and all threads that come later wait for ever. Here a wait is one
call of a C lock that this very wait has made. A handler that raises ends the wait, and leaves nothing behind
that others need.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Latch:
    """Is set once and stays set. Any thread may set it, and any number of threads may wait for that."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[_thread.LockType] = deque()

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            try:
                waiting = self._waiting.popleft()
            except IndexError:  # the thread that waited has taken it back
                return
            waiting.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, at most `timeout` seconds. Returns whether it is set."""
        if self._is_set:
            return True
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiting.append(mine)
        if not self._is_set:  # else `set` may have been here before
            mine.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        if not self._is_set:
            try:
                self._waiting.remove(mine)
            except ValueError:  # it is being set
                return True
        return self._is_set


def start_thread(run: Callable[[], object], name: str, *, daemon: bool = False) -> None:
    """Starts a thread, and returns when it has begun. If a signal handler raises meanwhile, it may begin yet.

    `RuntimeError` if there can be no more threads: in the interpreter's last moments, one that is not a
    `daemon` would not be waited for.
    """
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    begun = Latch()
    failed: list[RuntimeError] = []

    def start() -> None:
        try:
            # Not in the main thread: there, an interrupt of `is_alive` marks the main thread as ended.
            if not daemon and not threading.main_thread().is_alive():
                raise RuntimeError("the interpreter is ending")
            thread.start()
        except RuntimeError as error:
            failed.append(error)
        finally:
            begun.set()

    if threading.get_ident() == threading.main_thread().ident:
        _thread.start_new_thread(start, ())
        begun.wait()
    else:
        start()  # no handler runs here
    for error in failed:
        raise error


class Background(Generic[_T]):
    """A call on a thread of its own, and what comes of it. An interpreter that ends waits for it."""

    def __init__(self, function: Callable[[], _T], name: str) -> None:
        self._function = function
        self._ended = Latch()
        self._found: list[_T] = []
        self._error: BaseException | None = None
        start_thread(self._run, name)

    def result(self) -> _T:
        """Waits for the end of the call. Raises what it has raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def wait(self) -> None:
        """Returns when the call has ended, however it did."""
        self._ended.wait()

    def _run(self) -> None:
        try:
            self._found.append(self._function())
        except BaseException as error:  # raised by `result`
            self._error = error
        finally:
            del self._function
            self._ended.set()
