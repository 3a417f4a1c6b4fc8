"""Waits that a signal handler may end by raising: nothing that others need stays held."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from everystep.engine import threads
from everystep.engine.threads import Background, Latch, start_thread

SECONDS = 60.0


class Struck(BaseException):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """A signal whose handler raises, after so many seconds."""

    def strike(number: int, frame: FrameType | None) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def struck_everywhere(act: Callable[[], object], whenever: Callable[[], object]) -> int:
    """Raises at each line and call of `threads` and the standard library's threads in turn; how often."""
    files = (threads.__file__, threading.__file__)
    nth = 0
    while True:
        nth += 1
        left = nth

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raise Struck
            return trace

        sys.settrace(trace)
        try:
            act()
        except Struck:
            pass
        finally:
            sys.settrace(None)
        if left > 0:
            return nth - 1
        whenever()


def test_a_latch_releases_all_waiting_threads_and_later_ones() -> None:
    latch = Latch()
    found: list[bool] = []
    waiting = [threading.Thread(target=lambda: found.append(latch.wait(SECONDS))) for _ in range(5)]
    for thread in waiting:
        thread.start()
    assert not latch.is_set
    assert latch.wait(0.0) is latch.wait(0.01) is latch.wait(-1.0) is False
    latch.set()
    latch.set()
    for thread in waiting:
        thread.join()
    assert found == [True] * 5
    assert latch.wait() is latch.wait(0.0) is latch.is_set is True
    assert not latch._waiting


def test_a_wait_without_limit_is_ended_by_a_handler_that_raises(alarm: Callable[[float], None]) -> None:
    latch = Latch()
    began = time.monotonic()
    alarm(0.05)
    with pytest.raises(Struck):
        latch.wait()
    assert time.monotonic() - began < SECONDS
    latch.set()
    assert latch.wait(0.0)


def test_a_wait_struck_at_any_point_leaves_the_latch_usable() -> None:
    latches = [Latch()]

    def whenever() -> None:
        setting = threading.Thread(target=latches[-1].set)
        setting.start()
        assert latches[-1].wait(SECONDS)
        setting.join(SECONDS)
        assert not setting.is_alive()
        latches.append(Latch())

    assert struck_everywhere(lambda: latches[-1].wait(0.001), whenever) > 30


def test_a_thread_whose_start_is_struck_at_any_point_ends() -> None:
    """With `threading.Thread.start` it would wait for ever for the lock of its own `_started`."""
    before = threading.active_count()

    def whenever() -> None:
        # What starts a thread has no handle to wait by.
        deadline = time.monotonic() + SECONDS
        while threading.active_count() > before:
            assert time.monotonic() < deadline, threading.enumerate()
            time.sleep(0.001)
        assert threading.main_thread().is_alive()

    assert struck_everywhere(lambda: start_thread(lambda: None, "test-start"), whenever) > 30


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        start_thread(lambda: None, "none")


def test_a_call_in_the_background_has_a_result_or_an_error(alarm: Callable[[float], None]) -> None:
    assert Background(lambda: 5, "five").result() == 5
    failing = Background(lambda: 1 // 0, "fails")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.result()
    may_end = Latch()
    held = Background(lambda: may_end.wait(SECONDS), "held")
    alarm(0.02)
    with pytest.raises(Struck):
        held.result()
    may_end.set()
    assert held.result() is True
