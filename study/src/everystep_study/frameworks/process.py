"""A framework's process, seen from the harness: started, asked, and ended when it fails or takes too long."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from everystep_study import environments
from everystep_study.child import Child, NoAnswer, answers
from everystep_study.frameworks import Entry
from everystep_study.peers.base import remove

START_SECONDS = 300.0
"""Importing a framework, building a model, compiling its first step."""
_END_SECONDS = 5.0


class WorkerFailed(RuntimeError):
    """The framework raised an error; its process is well."""


class WorkerEnded(WorkerFailed):
    """The process ended, or took too long and was killed. The next order starts another one."""


class TimeUp(RuntimeError):
    """The time of the study is up. It says nothing about the framework, so it is no `WorkerFailed`."""


class FrameworkMissing(RuntimeError):
    """The framework is not installed; the message says what to do."""


class FrameworkProcess:
    """The worker of one framework, started at the first order and again after it has ended.

    An order may take `seconds`, and none may take longer than until `end` (of `time.monotonic`): then it is
    ended with `TimeUp`, and so is every later one.
    """

    def __init__(self, name: str, entry: Entry, folder: Path, seconds: float, end: float = math.inf) -> None:
        self._name, self._entry, self._folder, self._seconds = name, entry, folder, seconds
        self.end = end
        self._process: Child | None = None
        self._log = folder / f"{name}.log"
        self._prelude: dict[str, Any] | None = None

    def ask(self, do: str, seconds: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Sends an order, and returns the answer to it.

        A training that was built is built again in a new process.
        """
        self.look_at_clock()
        if self._process is None:
            self._start()
            self._send({"do": "hello"})  # importing a framework may take longer than any order
            self._answer(START_SECONDS)
            if self._prelude is not None and do != "build":
                self._send(self._prelude)
                self._answer(START_SECONDS)
        order = {"do": do, **arguments}
        if do == "build":
            self._prelude = order
        self._send(order)
        return self._answer(seconds or (START_SECONDS if do == "build" else self._seconds))

    def look_at_clock(self) -> None:
        if time.monotonic() >= self.end:
            raise TimeUp("the time of the study was up")

    def begin(self, do: str, **arguments: Any) -> None:
        """Sends an order whose answer is not waited for: the process is to be killed."""
        self._send({"do": do, **arguments})

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.finish(_END_SECONDS)
        self.kill()

    def __enter__(self) -> FrameworkProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        python, path = Path(sys.executable), os.environ.get("PYTHONPATH", "")
        if self._entry.environment is not None:
            found = environments.interpreter(self._entry.environment)
            if found is None:
                raise FrameworkMissing(
                    f"its environment is not built: everystep study setup {self._entry.environment}"
                )
            bridge = self._folder / f"{self._name}-path"
            python, path = found, str(bridge if bridge.exists() else environments.bridge(bridge))
        self._process = Child(
            [str(python), "-m", "everystep_study.frameworks.worker", self._entry.module],
            self._log,
            {"PYTHONPATH": path, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        )

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        self._process.send(json.dumps(order).encode())

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        line = b""
        try:
            ((_, line),) = answers([self._process], min(seconds, self.end - time.monotonic()))
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError
        except NoAnswer as error:
            self.kill()
            self.look_at_clock()
            raise WorkerEnded(f"its process {error}") from None
        except ValueError:
            self.kill()
            raise WorkerEnded(f"answered something that is no answer: {line[:80]!r}") from None
        except BaseException:
            self.kill()
            raise
        if "missing" in answer:
            raise FrameworkMissing(str(answer["missing"]))
        if "ok" not in answer:
            raise WorkerFailed(str(answer.get("failure", "no answer")))
        found: dict[str, Any] = answer["ok"]
        return found


@contextlib.contextmanager
def memory_folder(nbytes: int, where: Path = Path("/dev/shm")) -> Iterator[str]:
    """A folder in memory with so much room, or "" where there is none; removed at the end."""
    room = os.statvfs(where) if where.is_dir() else None
    if room is None or room.f_bavail * room.f_frsize < nbytes:
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="everystep-study-", dir=where)
    try:
        yield folder
    finally:
        remove(Path(folder))
