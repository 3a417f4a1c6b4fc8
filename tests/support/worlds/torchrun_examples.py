"""Examples as a user starts them, by ``torchrun``; and their sudden end, as when a machine is lost."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
DYING_SECONDS = 120.0


@contextmanager
def started(ranks: int, example: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The agent of a launch with one line of output per step; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, str(EXAMPLES / example), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        yield process
    finally:
        kill(process)
        assert process.stdout is not None
        process.stdout.close()


def run(ranks: int, example: str, *arguments: object) -> list[str]:
    """Launches an example to its end; the lines it printed."""
    with started(ranks, example, *arguments) as process:
        output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output.splitlines()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the agent and all ranks at once: none has time to say anything. All are gone then."""
    ranks = []
    for pid in children(process.pid) if process.poll() is None else []:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            ranks.append(os.pidfd_open(pid))
    process.kill()
    for rank in ranks:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank, signal.SIGKILL)
    process.wait()
    for rank in ranks:
        # A call that was under way is finished first: a rename, say. And until then the run is locked.
        assert select.select([rank], [], [], DYING_SECONDS)[0], "a rank does not die of SIGKILL"
        os.close(rank)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def read_until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> list[str]:
    """What it prints, up to and with the first line that is wanted."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if wanted(line):
            return lines
    raise AssertionError("it ended before that:\n" + "\n".join(lines))
