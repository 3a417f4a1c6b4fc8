"""Where this process runs: its machine, and the part of it that its processors and memory belong to."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def machine() -> str:
    """A text that only processes on the same running machine have in common, as far as they see it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def numa_node(nodes: Path = Path("/sys/devices/system/node")) -> int:
    """The one that holds all processors this process may run on; 0 when it may run on several."""
    try:
        allowed = os.sched_getaffinity(0)
        for folder in sorted(nodes.glob("node[0-9]*")):
            if allowed <= _cpus((folder / "cpulist").read_text()):
                return int(folder.name.removeprefix("node"))
    except (AttributeError, OSError, ValueError):  # not Linux, or a kernel that tells nothing
        return 0
    return 0


def _cpus(text: str) -> set[int]:
    """``0-3,8`` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
