"""Processes of our own that follow orders: frameworks in environments of their own, and real ranks.

An order is a function of this package that runs in the process. Its name and arguments go there as one line
of JSON, and its answer comes back as one. `worker` is the other end. The processes run in sessions of their
own, so that Ctrl-C reaches only this one, which then ends them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from everystep_study import environments
from everystep_study.frameworks import FrameworkEntry
from everystep_study.workers import orders, rank_orders

START_SECONDS = 300.0
"""Importing a framework, building a model, compiling its first step."""
_END_SECONDS = 10.0
_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.01
_LAST_LINES = 3

Order = Callable[..., dict[str, Any]]


class WorkerFailed(RuntimeError):
    """The order raised an error; the process is well."""


class WorkerEnded(WorkerFailed):
    """A process ended, or took too long and was killed. The next order starts a new one."""


class TimeUp(RuntimeError):
    """The time of the study is up. It says nothing about the framework, so it is no `WorkerFailed`."""


class FrameworkMissing(RuntimeError):
    """The framework is not installed; the message says what to do."""


class Child:
    """A process that has been started. What it says beside its answers goes into `log`."""

    def __init__(self, python: str, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "everystep_study.workers.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self.answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer will tell
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{how}{': ' if last else ''}{' / '.join(last[-_LAST_LINES:])}"

    def finish(self) -> None:
        """There are no more orders: it ends by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def has_ended_well(self, seconds: float) -> bool:
        try:
            return self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """Ends it, with the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._orders, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Workers(ABC):
    """Processes that follow the same orders, started at the first order and again after one has ended.

    An order may take `seconds`, and none may take longer than until `end` (of `time.monotonic`): then they
    are ended with `TimeUp`, as is every later order.
    """

    def __init__(self, folder: Path, seconds: float, end: float) -> None:
        self.folder, self.end = folder, end
        self._seconds = seconds
        self._children: list[Child] = []
        self._why_not: str | None = None

    @abstractmethod
    def _start(self) -> Iterator[Child]:
        """Starts the processes."""

    @abstractmethod
    def _prepare(self) -> None:
        """The first orders to processes that have just been started."""

    @property
    def _all(self) -> str:
        """What messages call them; `_name` is one of them."""
        return "its process"

    def _name(self, which: int) -> str:
        return "its process"

    def tell(self, order: Order, seconds: float | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """All follow the order; their answers, in the order of the processes."""
        self.look_at_clock()
        if not self._children:
            self.start()
        return self._tell(order, seconds or self._seconds, arguments)

    def start(self) -> None:
        if self._why_not is not None:
            raise WorkerEnded(self._why_not)  # once is enough: it may have taken all of the time-out
        try:
            for child in self._start():
                self._children.append(child)
            self._prepare()
        except WorkerFailed as error:
            self.kill()
            self._why_not = f"{self._all} could not be started: {error}"
            raise WorkerEnded(self._why_not) from None
        except BaseException:
            self.kill()
            raise

    def _tell(
        self,
        order: Order,
        seconds: float,
        arguments: Mapping[str, Any],
        own: Sequence[Mapping[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        do = f"{order.__module__}:{order.__name__}"
        found: dict[int, dict[str, Any]] = {}
        try:
            for number, child in enumerate(self._children):
                child.send({"do": do, **arguments, **(own[number] if own else {})})
            for which, line in self._lines(max(0.0, min(seconds, self.end - time.monotonic()))):
                found[which] = self._answer(which, line)
        except WorkerEnded:
            self.kill()
            self.look_at_clock()
            raise
        except KeyboardInterrupt:
            self.kill()
            raise
        return [found[which] for which in range(len(self._children))]

    def look_at_clock(self) -> None:
        if time.monotonic() >= self.end:
            raise TimeUp("the time of the study was up")

    def begin(self, order: Order, **arguments: Any) -> None:
        """Sends an order whose answer is not waited for: the process is to be killed."""
        for child in self._children:
            child.send({"do": f"{order.__module__}:{order.__name__}", **arguments})

    def kill(self) -> None:
        children, self._children = self._children, []
        for child in children:
            child.kill()

    def close(self) -> None:
        """All end by themselves, then are killed; `WorkerEnded` if one does not end well."""
        for child in self._children:
            child.finish()
        try:
            for which, child in enumerate(self._children):
                if not child.has_ended_well(_END_SECONDS):
                    raise WorkerEnded(f"{self._name(which)} did not end well")
        finally:
            self.kill()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(WorkerEnded):
            self.close()

    def _lines(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """One line of each as it comes, with the number of the process, within the time."""
        end = time.monotonic() + seconds
        begun = dict.fromkeys(range(len(self._children)), b"")
        with selectors.DefaultSelector() as selector:
            for which, child in enumerate(self._children):
                selector.register(child.answers, selectors.EVENT_READ, which)
            while begun:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise WorkerEnded(f"{self._name(min(begun))} did not answer within {seconds:.3g} s")
                for key, _ in ready:
                    which, data = key.data, os.read(key.fd, 1 << 16)
                    if not data:
                        raise WorkerEnded(f"{self._name(which)} {self._children[which].how_it_ended()}")
                    begun[which] += data
                    if begun[which].endswith(b"\n"):
                        selector.unregister(key.fileobj)
                        yield which, begun.pop(which)

    def _answer(self, which: int, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
            failure, found = answer.get("failure"), answer.get("ok")
        except (ValueError, AttributeError):
            raise WorkerEnded(f"answered something that is no answer: {line[:80]!r}") from None
        if failure is None:
            return dict(found)
        if len(self._children) > 1:  # the others may wait for it in a collective
            raise WorkerEnded(self._first_to_end() or f"{self._name(which)}: {failure}")
        raise WorkerFailed(failure)

    def _first_to_end(self) -> str | None:
        """The process that has ended, if one has: what others say is then only that they miss it."""
        end = time.monotonic() + _GRACE_SECONDS  # sockets close a moment before a process is gone
        while time.monotonic() < end:
            for which, child in enumerate(self._children):
                if child.ended():
                    return f"{self._name(which)} {child.how_it_ended()}"
            time.sleep(_POLL_SECONDS)
        return None


class FrameworkProcess(Workers):
    """The process of one framework. A training that was built is built again in a new process."""

    def __init__(
        self, name: str, entry: FrameworkEntry, folder: Path, seconds: float, end: float = math.inf
    ) -> None:
        super().__init__(folder, seconds, end)
        self.hello: dict[str, Any] = {}
        """What the framework says of itself, once it has been started."""
        self._label, self._entry = name, entry
        self._built: dict[str, Any] | None = None

    def ask(self, order: Order, seconds: float | None = None, **arguments: Any) -> dict[str, Any]:
        if order is orders.build:
            self._built, seconds = None, START_SECONDS  # a new process need not build what this replaces
        (found,) = self.tell(order, seconds, **arguments)
        if order is orders.build:
            self._built = arguments
        return found

    def _start(self) -> Iterator[Child]:
        python, path = Path(sys.executable), os.environ.get("PYTHONPATH", "")
        if self._entry.environment is not None:
            found = environments.interpreter(self._entry.environment)
            if found is None:
                raise FrameworkMissing(
                    f"its environment is not built: everystep study setup {self._entry.environment}"
                )
            bridge = self.folder / f"{self._label}-path"
            python, path = found, str(bridge if bridge.exists() else environments.bridge(bridge))
        variables = {"PYTHONPATH": path, "PATH": f"{python.parent}:{os.environ['PATH']}"}
        yield Child(str(python), self.folder / f"{self._label}.log", variables)

    def _prepare(self) -> None:
        (self.hello,) = self._tell(orders.hello, START_SECONDS, {"module": self._entry.module})
        if missing := self.hello.get("missing"):
            raise FrameworkMissing(missing)
        if self._built is not None:
            self._tell(orders.build, START_SECONDS, self._built)


class Ranks(Workers):
    """Ranks in a gloo process group over the loopback device, each with the same state of `nbytes`.

    This process hosts the group's store, as the agent of ``torchrun`` does.
    """

    ENVIRONMENT: ClassVar[dict[str, str]] = {
        "GLOO_SOCKET_IFNAME": "lo",
        # torch looks up the names of its peers, and waits for name servers that do not answer.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }

    def __init__(self, size: int, nbytes: int, folder: Path, seconds: float, end: float = math.inf) -> None:
        super().__init__(folder, seconds, end)
        self.size = size
        self._nbytes = nbytes
        self._prepared: set[str] = set()
        self._starts = 0

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def open(self, mechanism: str) -> None:
        """Opens a mechanism on all ranks, once in each group."""
        if not self._children:
            self.start()
        if mechanism not in self._prepared:
            directory = self.folder / f"{mechanism}-{self._starts}"
            directory.mkdir()
            self.tell(rank_orders.open_mechanism, mechanism=mechanism, directory=str(directory))
            self._prepared.add(mechanism)

    @property
    def _all(self) -> str:
        return f"{self.size} ranks"

    def _name(self, which: int) -> str:
        return f"rank {which}"

    def _start(self) -> Iterator[Child]:
        self._starts += 1
        self._prepared.clear()
        for rank in range(self.size):
            log = self.folder / f"rank-{rank}-{self._starts}.log"
            yield Child(sys.executable, log, self.ENVIRONMENT)

    def _prepare(self) -> None:
        import torch.distributed as dist

        host = rank_orders.HOST
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        same = {
            "world": self.size,
            "port": self._store.port,
            "nbytes": self._nbytes,
            "timeout": self._seconds,
        }
        own = [{"rank": rank} for rank in range(self.size)]
        self._tell(rank_orders.join, self._seconds, same, own)
