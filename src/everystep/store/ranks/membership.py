"""Who the ranks of a process group are, and on which machines and sockets they run."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from everystep.plan.topology import Topology

_SHOWN = 8


class Member(msgspec.Struct, frozen=True):
    """One rank: its process, on which machine, on which socket (NUMA node) of it."""

    host: str
    machine: str
    pid: int
    socket: int


class Membership:
    """The ranks of a process group, as all of them know it. Its `token` names it in messages."""

    def __init__(self, token: str, members: Sequence[Member]) -> None:
        machines: dict[str, int] = {}
        nodes = tuple(machines.setdefault(member.machine, len(machines)) for member in members)
        self.token = token
        self.members = tuple(members)
        self.topology = Topology(nodes, tuple(member.socket for member in members))


def this_member() -> Member:
    """The member that this process is."""
    return _member(os.getpid())


@functools.cache
def _member(pid: int) -> Member:
    return Member(socket.gethostname(), machine(), pid, numa_node())


def machine() -> str:
    """A text that only processes on the same running machine have in common, as far as they see it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def numa_node(nodes: Path = Path("/sys/devices/system/node")) -> int:
    """The node that holds all processors this process may run on; 0 if it may run on several."""
    try:
        allowed = os.sched_getaffinity(0)
        for folder in sorted(nodes.glob("node[0-9]*")):
            if allowed <= _cpus((folder / "cpulist").read_text()):
                return int(folder.name.removeprefix("node"))
    except (AttributeError, OSError, ValueError):  # not Linux, or a kernel that does not say
        return 0
    return 0


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2``; of many, the first."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _cpus(text: str) -> set[int]:
    """``0-3,8`` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
