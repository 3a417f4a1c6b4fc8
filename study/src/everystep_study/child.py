"""Processes of our own that answer orders, one line each way: ranks of a world, workers of frameworks.

They run in sessions of their own, so that Ctrl-C reaches only this process, which then ends them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_LAST_LINES = 3


class NoAnswer(RuntimeError):
    """Child number `which` has ended or takes too long; the message says how."""

    def __init__(self, which: int, how: str) -> None:
        super().__init__(how)
        self.which = which


class Child:
    """A process that has been started. What it says beside its answers goes into `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
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

    def send(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer will tell
            self._orders.write(line + b"\n")
            self._orders.flush()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{how}{': ' if last else ''}{' / '.join(last[-_LAST_LINES:])}"

    def finish(self, seconds: float) -> None:
        """Lets it end by itself, for so long."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Ends it, with the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._orders, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def answers(children: Sequence[Child], seconds: float) -> Iterator[tuple[int, bytes]]:
    """One line of each as it comes, with the child's number, within the time. Raises `NoAnswer`."""
    end = time.monotonic() + seconds
    begun = dict.fromkeys(range(len(children)), b"")
    with selectors.DefaultSelector() as selector:
        for which, child in enumerate(children):
            selector.register(child.answers, selectors.EVENT_READ, which)
        while begun:
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                raise NoAnswer(min(begun), f"did not answer within {seconds:.3g} s")
            for key, _ in ready:
                which = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    raise NoAnswer(which, children[which].how_it_ended())
                begun[which] += data
                if begun[which].endswith(b"\n"):
                    selector.unregister(key.fileobj)
                    yield which, begun.pop(which)
