"""One start of the script under drill: begun in a process group of its own, watched, killed without mercy.

Owns processes and time-outs. When to kill is `aim`'s, what came of it is for others to judge.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpointer.drilling import DIARY, DIRECTORY, KILL, Kill
from holdfast.study.drill.diary import Diary, Phase

_QUICK_SECONDS = 0.002
"""Between two looks while a moment to kill is being waited for."""
_SLOW_SECONDS = 0.05
_DYING_SECONDS = 60.0
_TAIL_LINES = 15
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is how a shell reports it

Trigger = Callable[[Diary, float], bool]
"""Asked again and again, with the time: kill now?"""
Watch = Callable[[Diary], None]


class DrillFailed(Exception):
    """The drill itself could not be held; the message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start that has ended: by itself (`exit_code`), killed, or because it took too long.

    `wrapped`: the process that trains is not the one that was started, but a child of it.
    """

    diary: Diary
    began_at: float
    seconds: float
    exit_code: int
    killed: bool
    timed_out: bool
    wrapped: bool
    errors: str

    @property
    def phase(self) -> Phase:
        return self.diary.phase

    @property
    def finished(self) -> bool:
        return not self.killed and not self.timed_out and self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Where starts take place that share their runs."""

    directory: Path
    command: tuple[str, ...]
    timeout: float

    def start(
        self,
        number: int,
        *,
        trigger: Trigger | None = None,
        kill: Kill | None = None,
        watch: Watch = lambda diary: None,
    ) -> Start:
        """Starts the command and waits for its end; `trigger` and `kill` are two ways to bring it about."""
        self.directory.mkdir(parents=True, exist_ok=True)
        diary = Diary(self.directory / DIARY)
        errors = self.directory / f"start-{number:03d}.err"
        environment = {**os.environ, DIRECTORY: str(self.directory.absolute())}
        environment.pop(KILL, None)
        if kill is not None:
            environment[KILL] = str(kill)
        began = time.monotonic()
        with (
            open(self.directory / f"start-{number:03d}.out", "wb") as out,
            open(errors, "wb") as err,
            _group(self.command, environment, out.fileno(), err.fileno()) as child,
        ):
            fired = timed_out = False
            while child.poll() is None:
                diary.follow()
                watch(diary)
                now = time.monotonic()
                fired = trigger is not None and trigger(diary, now)
                timed_out = now - began > self.timeout
                if fired or timed_out:
                    break
                _pause(child, _SLOW_SECONDS if trigger is None else _QUICK_SECONDS)
        seconds = time.monotonic() - began
        diary.close()
        watch(diary)
        code = child.returncode
        # A wrapper (a shell, a launcher) has an exit code of its own when the script dies by its own hand.
        wrapped = any(account.pid != child.pid for account in diary.accounts.values())
        by_itself = kill is not None and (code in _KILLED or (code != 0 and wrapped))
        killed = (fired and code != 0) or by_itself
        return Start(
            diary,
            began,
            seconds,
            code,
            killed,
            timed_out and not killed and code != 0,
            wrapped,
            _tail(errors),
        )


@contextmanager
def _group(
    command: tuple[str, ...], environment: dict[str, str], out: int, err: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a new process group, none of which is alive when this ends."""
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    except OSError as error:
        raise DrillFailed(f"cannot start {command[0]!r}: {error.strerror or error}") from None
    try:
        yield child
    finally:
        # Also after an end by itself: a worker left behind would write into the next start's run.
        deadline = time.monotonic() + _DYING_SECONDS
        while _alive(child.pid):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise DrillFailed(f"process group {child.pid} does not die of SIGKILL (a hanging device?)")
            time.sleep(_QUICK_SECONDS)
        child.wait(_DYING_SECONDS)


def _alive(group: int) -> bool:
    """Whether a process of the group still runs. One that only waits to be reaped does not."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                state, _, process_group = file.read().rpartition(b") ")[2].split(b" ", 3)[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_group) == group and state not in (b"Z", b"X"):
            return True
    return False


def _pause(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Until the child ends, at most so long."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _tail(path: Path) -> str:
    lines = path.read_text("utf-8", "backslashreplace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
