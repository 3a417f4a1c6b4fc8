"""Short time-outs for ranks that do not come, and only for these.

Where a test is about silence, a rank that the machine has not let run for some seconds must not be taken for
a silent one. So the time of the silent begins when everybody else has come: on events, not on luck. All of
this changes how the present process waits for messages, and nothing of what they say.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from everystep.store.ranks.message_store import MessageStore, MessageTimeout
from everystep.store.ranks.transport import Transport

PATIENCE_SECONDS = 60.0
"""For what is sure to come: only a hang takes longer."""
_LOOK_SECONDS = 0.2


@contextmanager
def expecting(*ranks: int) -> Iterator[None]:
    """A rank that collects messages of several ranks waits for these first, and only then begins to count."""
    collect = MessageStore.collect
    known = {str(rank) for rank in ranks}

    def patient(self: MessageStore, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        if timeout > 0:
            collect(self, [key for key in keys if _last(key) in known], PATIENCE_SECONDS)
        return collect(self, keys, timeout)

    with mock.patch.object(MessageStore, "collect", patient):
        yield


@contextmanager
def said_together() -> Iterator[None]:
    """All ranks have said what they are at before the time of anybody begins."""
    import torch.distributed as dist

    say = Transport.say

    def together(self: Transport, what: str) -> None:
        say(self, what)
        dist.barrier()

    with mock.patch.object(Transport, "say", together):
        yield


def outlive(victim: int, pid: int) -> None:
    """From now on, time-outs count from the death of a rank, which is that process; the living have time.

    One that is stopped is as good as dead.
    """
    read, collect = MessageStore.read, MessageStore.collect

    def patient_read(self: MessageStore, key: str, timeout: float) -> bytes:
        """What is read by itself is the coordinator's."""
        if timeout > 0 and victim != 0:
            return read(self, key, max(timeout, PATIENCE_SECONDS))
        while timeout > 0 and lives(pid):
            with suppress(MessageTimeout):
                return read(self, key, _LOOK_SECONDS)
        return read(self, key, timeout)

    def patient_collect(self: MessageStore, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        if timeout > 0:
            collect(self, [key for key in keys if _last(key) != str(victim)], PATIENCE_SECONDS)
        while timeout > 0 and lives(pid):
            found = collect(self, keys, _LOOK_SECONDS)
            if len(found) == len(keys):
                return found
        return collect(self, keys, timeout)

    # For the rest of this process, which is the test's own.
    mock.patch.multiple(MessageStore, read=patient_read, collect=patient_collect).start()


def lives(pid: int) -> bool:
    """Whether there is such a process, and it has neither ended nor been stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZXT"


def stop_here() -> None:
    """Stops this process at this very line until it is told to go on.

    A signal to the process may go to another of its threads, and this one would run on until that one runs.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def wait_until_stopped(pid: int) -> None:
    """Until a process that was sent SIGSTOP does nothing any more."""
    while "T" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
        time.sleep(0.01)


def wait_for(path: Path) -> None:
    """Until a file is there: how a test and the ranks of several worlds wait for each other."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"there is still no {path}"
        time.sleep(0.01)


def _last(key: str) -> str:
    """Of a rank's message to the coordinator this is the rank."""
    return key.rpartition("/")[2]
