"""One start of the script under drill: started, watched, and killed with all processes that it started.

Owns processes and time-outs. `kill_times` says when to kill, `procedure` what the outcome means.
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

from everystep.checkpointer.drilling import DIARY, DIRECTORY, KILL, Kill
from everystep.drill.activity import ActivityLog, Phase
from everystep.errors import EverystepError

_QUICK_SECONDS = 0.002
"""Pause between two checks whether to kill now."""
_SLOW_SECONDS = 0.05
_DYING_SECONDS = 60.0
_BEGINNING_SECONDS = 1.0
"""How long a process may take to get its environment after `exec`."""
_TAIL_LINES, _TAIL_NBYTES = 15, 64 << 10
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is how a shell reports it

Trigger = Callable[[ActivityLog, float], bool]
"""Called repeatedly with the time. Returns whether to kill now."""
Watch = Callable[[ActivityLog], None]


class DrillFailed(EverystepError):
    """The drill could not be run. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start that has ended: by itself (`exit_code`), killed, or because it took too long.

    `wrapped`: the process that trains is not the one that was started, but a child of it.
    """

    log: ActivityLog
    began_at: float
    seconds: float
    exit_code: int
    killed: bool
    timed_out: bool
    wrapped: bool
    errors: str

    @property
    def phase(self) -> Phase:
        return self.log.phase

    @property
    def finished(self) -> bool:
        return not self.killed and not self.timed_out and self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The directory of starts that share their runs."""

    directory: Path
    command: tuple[str, ...]
    timeout: float

    def start(
        self,
        number: int,
        *,
        trigger: Trigger | None = None,
        kill: Kill | None = None,
        watch: Watch = lambda log: None,
    ) -> Start:
        """Starts the command and waits for its end; `trigger` and `kill` are two ways to end it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        log = ActivityLog(self.directory / DIARY)
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
                log.follow()
                watch(log)
                now = time.monotonic()
                fired = trigger is not None and trigger(log, now)
                timed_out = now - began > self.timeout
                if fired or timed_out:
                    break
                _pause(child, _SLOW_SECONDS if trigger is None else _QUICK_SECONDS)
        seconds = time.monotonic() - began
        log.close()
        watch(log)
        code = child.returncode
        # A wrapper (a shell, a launcher) has an exit code of its own when the script dies by its own hand.
        wrapped = any(activity.pid != child.pid for activity in log.runs.values())
        by_itself = kill is not None and (code in _KILLED or (code != 0 and wrapped))
        killed = (fired and code != 0) or by_itself
        return Start(
            log,
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
    """The command as a new process group. When this ends, no process that it started is alive."""
    child: subprocess.Popen[bytes] | None = None
    try:
        child = _begin(command, environment, out, err)
        yield child
    finally:
        mark = f"{DIRECTORY}={environment[DIRECTORY]}"
        try:
            _clear(child, mark)
        except (KeyboardInterrupt, SystemExit):  # end the drill, but only after all processes
            _clear(child, mark)
            raise


def _clear(child: subprocess.Popen[bytes] | None, mark: str) -> None:
    if child is not None and child.returncode is None:  # not reaped: the number still means its group
        with suppress(ProcessLookupError):  # reaped after all, when an interrupt came just then
            os.killpg(child.pid, signal.SIGKILL)
    # Also after an end by itself: a worker left behind would write into the next start's run. And when
    # Ctrl-C came while it was being started, so its number is not known.
    _kill_all(None if child is None else child.pid, mark)
    if child is not None:
        child.wait(_DYING_SECONDS)


def _begin(
    command: tuple[str, ...], environment: dict[str, str], out: int, err: int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    except OSError as error:
        raise DrillFailed(f"cannot start {command[0]!r}: {error.strerror or error}") from None


def _kill_all(group: int | None, mark: str) -> None:
    """Kills what is left of a start, repeatedly, until nothing is left.

    Launchers give each worker a session of its own (torchrun does), where no signal to the group reaches it.
    What the drill has put into the environment is handed down to all of them. A process that
    has it and is older than the drill got it from elsewhere, for example from a user who examines a start.
    """
    entry = b"\0" + os.fsencode(mark) + b"\0"
    (drill,) = (found for found in _running() if found.pid == os.getpid())
    known: set[_Process] = set()
    deadline = time.monotonic() + _DYING_SECONDS
    while left := [
        found
        for found in _running()
        if found.began > drill.began and (found in known or _belongs(found, group, entry))
    ]:
        known.update(left)
        for found in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(found.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            pids = ", ".join(str(found.pid) for found in left)
            raise DrillFailed(f"these processes do not die of SIGKILL: {pids} (a hanging device?)")
        time.sleep(_QUICK_SECONDS)


@dataclass(frozen=True, slots=True)
class _Process:
    """`began` tells it from a later process with the same number."""

    pid: int
    group: int
    began: int


def _running() -> Iterator[_Process]:
    """All processes of the system except zombies."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            fields = _stat(entry.name)
        except OSError:
            continue  # it has ended, or may not be examined
        if fields and fields[0] not in (b"Z", b"X"):
            yield _Process(int(entry.name), int(fields[2]), int(fields[19]))


def _stat(pid: int | str) -> list[bytes]:
    """The fields of proc_pid_stat(5), from the third one on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2].split()


def _belongs(found: _Process, group: int | None, entry: bytes) -> bool:
    if found.group == group:
        return True
    try:
        return entry in b"\0" + _environment(found.pid) + b"\0"
    except OSError:
        return False


def _environment(pid: int) -> bytes:
    """Waits for a process in `exec`, which has none for a moment."""
    deadline = time.monotonic() + _BEGINNING_SECONDS
    settled = False
    while True:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
        if environment or settled or time.monotonic() > deadline:
            return environment
        fields = _stat(pid)
        memory, code = int(fields[20]), int(fields[23])
        # A new program gets its code after its environment. Ending processes and the kernel's have none.
        settled = memory == 0 or code != 0
        if not settled:
            time.sleep(_QUICK_SECONDS)


def _pause(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until the child ends, at most so long."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_NBYTES, 0))
        lines = file.read().decode("utf-8", "backslashreplace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
