"""What `Checkpointer.save` returns: a save under way, which behaves like a `concurrent.futures.Future`.

Owns the outcome of a save and who has seen its error. Making the save is `save_task`'s.
"""

from __future__ import annotations

import os
import threading
import time

from everystep.checkpointer.live_memory import LiveMemory
from everystep.engine import forks
from everystep.engine.threads import Latch
from everystep.errors import EngineTimeout
from everystep.store import CheckpointInfo


class Stall:
    """How long training has waited for one save so far. ``with stall:`` the training's thread waits."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        since = self._since
        return self._seconds + (time.perf_counter() - since if since is not None else 0.0)

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        began, self._since = self._since, None
        if began is not None:
            self._seconds += time.perf_counter() - began


class PendingSave:
    """A save that was started. It is durable once `result` has returned.

    `done`, `result` and `exception` are those of a `concurrent.futures.Future`. An error that one of them has
    shown is not raised by the Checkpointer's next call any more. Only the process that saves can ask: in a
    forked child they raise a `RuntimeError`.
    """

    def __init__(self, step: int, memory: LiveMemory, stall: Stall) -> None:
        self.step = step
        self._memory = memory
        self._stall = stall
        self._pid, self._forks = os.getpid(), forks()
        self._lock = threading.Lock()
        self._ended = Latch()
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._seen = False

    def done(self) -> bool:
        """Whether the save has ended: the checkpoint is durable, or the save has failed."""
        self._check_process()
        return self.ended

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until the checkpoint is durable. Raises the error if the save has failed.

        Args:
            timeout: Seconds after which an `EngineTimeout` (a `TimeoutError`) is raised. The save goes on.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._info is not None, "a save that ended has a result or an error"
        return self._info

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended. Returns its error; None if the checkpoint is durable.

        Args:
            timeout: Seconds after which an `EngineTimeout` (a `TimeoutError`) is raised. The save goes on.
        """
        self._check_process()
        with self._stall:
            ended = self._ended.wait(timeout)
        if not ended:
            raise EngineTimeout(f"step {self.step} was not durable within {timeout} s; its save goes on")
        with self._lock:
            self._seen = True
        return self._error

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have left memory, and all bytes, while the save is under way."""
        return self._memory.progress

    def __repr__(self) -> str:
        how = "under way" if not self.ended else "durable" if self._info is not None else "failed"
        return f"<save of step {self.step}, {how}>"

    def _check_process(self) -> None:
        if forks() != self._forks:
            raise RuntimeError(
                f"the save of step {self.step} belongs to process {self._pid}, of which this is a forked "
                "child: ask there whether it is durable"
            )

    # --- for the Checkpointer

    @property
    def ended(self) -> bool:
        return self._ended.is_set

    def wait_for_end(self, timeout: float | None) -> bool:
        """Whether the save has ended in time. The error still counts as not seen."""
        return self._ended.wait(timeout)

    def unseen_error(self) -> BaseException | None:
        """The error of a save that has failed, if it was not shown before; from now on it counts as shown."""
        with self._lock:
            if not self.ended or self._seen:
                return None
            self._seen = True
            return self._error

    def set_result(self, info: CheckpointInfo) -> None:
        self._info = info
        self._ended.set()

    def set_exception(self, error: BaseException, *, seen: bool = False) -> None:
        """`seen`: it is being raised already."""
        with self._lock:
            self._error, self._seen = error, seen
        self._ended.set()
