"""Two nodes on one machine: namespaces for the network, the host's name and the mounts.

Each node has a host name and an address of its own, and directories that only it sees. Everything else is
shared, as on a network file system. `launch(..., nodes=nodes)` runs the ranks on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE = "link0"
PORT = 29_500
"""Of the store. Every pair of nodes has a network of its own, so no two tests meet."""
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node, for as long as the process `pid` lives."""

    name: str
    address: str
    pid: int

    def enter(self) -> None:
        """From now on this process, which has one thread, runs on the node."""
        libc = ctypes.CDLL(None, use_errno=True)
        # All are opened first: another /proc may be mounted in there.
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(open(f"/proc/{self.pid}/ns/{kind}")) for kind in ("net", "uts", "mnt")
            ]
            where = os.getcwd()
            for file in files:
                if libc.setns(file.fileno(), 0):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error), file.name)
            os.chdir(where)

    def run(self, *command: str | Path) -> None:
        """Runs a command on the node, as the one who administers it."""
        _run("nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", *map(str, command))

    def mount(self, source: Path, target: Path) -> None:
        """On this node, `target` is the directory `source`."""
        self.run("mount", "--bind", source, target)


def missing() -> str:
    """Why there can be no nodes here; empty when there can."""
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, timeout=_SECONDS
    )
    return tried.stderr.strip() if tried.returncode else ""


@contextlib.contextmanager
def two_nodes(names: Sequence[str] = ("node-a", "node-b")) -> Iterator[tuple[Node, Node]]:
    """Two nodes with a cable between them."""
    with contextlib.ExitStack() as stack:
        first, second = (
            Node(name, f"10.213.0.{number}", stack.enter_context(_holder(name)))
            for number, name in enumerate(names, 1)
        )
        first.run(
            "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second.pid)
        )
        for node in (first, second):
            node.run("ip", "address", "add", f"{node.address}/24", "dev", DEVICE)
            node.run("ip", "link", "set", DEVICE, "up")
        yield first, second


@contextlib.contextmanager
def _holder(name: str) -> Iterator[int]:
    """A process that keeps the namespaces of a node; its pid. It ends when this process does."""
    script = f"hostname {name} && ip link set lo up && echo up && cat"
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process.pid
    finally:
        process.communicate(timeout=_SECONDS)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


def node_of(nodes: Sequence[Node], rank: int, world: int) -> int:
    """Which of the nodes a rank runs on: the first ranks on the first one."""
    return rank * len(nodes) // world
