"""Worlds of real processes: a function runs on every rank of a gloo process group, and nothing ever hangs.

Ranks are forked from a server process that has torch loaded already, so that one starts in a fraction of a
second. Everything talks over the loopback device, on ports that the kernel chose: worlds of several test
processes do not meet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from support.worlds.nodes import DEVICE, PORT, Node, node_of

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 150.0
"""Only a hang takes longer, on a machine that is busy with other tests and whose disk is slow."""
GRACE_SECONDS = 60.0
"""How long a rank that is late may take to print where it stands, before it is killed."""
DUMP_SECONDS = 45.0
"""A rank that still runs after this time prints where its threads are, and again each time it is over. It is
less than the patience of tests: a rank that gives up on another has had the other print where it stood."""
LEAVING_SECONDS = 10.0
"""How long one may take to end that only stayed for the sake of others that were late."""

StoreHost = Literal["agent", "rank0"]

_PRELOADED = (
    "numpy",
    "msgspec",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "everystep.checkpointer",
    "everystep.plan.ranks",
)
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # torch looks up the names of its peers, and all clients of a store wait while it does: no lookups.
    "RES_OPTIONS": "attempts:0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}

_TELL = signal.SIGUSR2
"""Makes a rank print where its threads are, whatever they do."""
_TOLD = re.compile(r'launcher\.py", line [0-9]+ in _run$', re.MULTILINE)
"""The outermost frame here, and so printed after all that it has called."""

# Also for this process, in which stores are hosted and looked at. Their threads read it whenever they start.
os.environ["RES_OPTIONS"] = _ENVIRONMENT["RES_OPTIONS"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a rank: a value, an error, or a process that ended or was ended otherwise."""

    rank: int
    exitcode: int | None
    """Negative: the signal that ended it."""
    value: Any = None
    error: str | None = None
    """The name of the type of the exception that left the target."""
    message: str = ""
    traceback: str = ""
    timed_out: bool = False
    """It was still running at the end of the time, and was killed."""
    output: str = ""
    """What it printed, on both streams; of one that ran long or timed out also where its threads were."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0 and not self.timed_out

    def describe(self) -> str:
        """For people: all that is known."""
        state = "timed out" if self.timed_out else f"exit code {self.exitcode}"
        return "\n".join(filter(None, [f"rank {self.rank}: {state}", self.traceback, self.output]))


@dataclass(frozen=True, slots=True)
class _Orders:
    """What a rank is told when it starts."""

    rank: int
    world: int
    port: int
    timeout: float
    dump_after: float
    call: bytes
    folder: str
    environment: Mapping[str, str]
    nodes: tuple[Node, ...] = ()

    @property
    def node(self) -> int:
        """The number of the node that this rank runs on."""
        return node_of(self.nodes, self.rank, self.world) if self.nodes else 0

    @property
    def host(self) -> str:
        """Where the store is."""
        return self.nodes[0].address if self.nodes else HOST


class Ranks:
    """The processes of a world, while they run."""

    def __init__(
        self, processes: Sequence[BaseProcess], pipes: Sequence[Connection], folder: Path, end: float
    ):
        self._processes = processes
        self._pipes = pipes
        self._folder = folder
        self._end = end

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(process.pid or 0 for process in self._processes)

    def gather(self) -> None:
        """Let all ranks begin once all are in the process group: no end of one disturbs its making."""
        for pipe in self._pipes:
            with contextlib.suppress(EOFError, OSError):  # it failed before
                if pipe.poll(max(0.0, self._end - time.monotonic())):
                    pipe.recv_bytes()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(b"begin")

    def await_ended(self, ranks: Sequence[int]) -> None:
        """Wait until these have ended; AssertionError when they take too long."""
        late = self._wait(ranks, self._end)
        assert not late, f"{late} of these ranks have not ended"

    def join(self, seconds: float | None = None) -> list[Outcome]:
        """Wait for all, kill those that take too long, or longer than `seconds`; what became of each."""
        if seconds is not None:
            self._end = min(self._end, time.monotonic() + seconds)
        late = self._end_late(self._wait(range(1, len(self._processes)), self._end))
        self._pipes[0].close()
        # One that only stayed for the others' sake needs a moment to end.
        end = max(self._end, time.monotonic() + LEAVING_SECONDS) if late else self._end
        late |= self._end_late(self._wait([0], end))
        return [self._outcome(rank, rank in late) for rank in range(len(self._processes))]

    def _wait(self, ranks: Sequence[int], end: float) -> set[int]:
        """Wait until these ranks have ended; those that have not at the end."""
        left = {self._processes[rank].sentinel: rank for rank in ranks}
        ended: Sequence[Any] = (None,)
        while left and ended:
            ended = multiprocessing.connection.wait(list(left), max(0.0, end - time.monotonic()))
            for sentinel in ended:
                self._processes[left.pop(sentinel)].join()
        return set(left.values())

    def _end_late(self, ranks: set[int]) -> set[int]:
        """Kill these ranks, as soon as they have printed where they stand."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself after all
                os.kill(self.pids[rank], _TELL)
        end = time.monotonic() + GRACE_SECONDS
        for rank in ranks:
            process = self._processes[rank]
            while time.monotonic() < end and not _TOLD.search(self._output(rank)):
                process.join(0.05)
                if not process.is_alive():
                    break
            process.kill()
            process.join()
        return ranks

    def _output(self, rank: int) -> str:
        return (self._folder / f"{rank}.output").read_text(errors="replace").strip()

    def _outcome(self, rank: int, late: bool) -> Outcome:
        output = self._output(rank)
        exitcode = self._processes[rank].exitcode
        try:
            data = (self._folder / f"{rank}.result").read_bytes()
        except FileNotFoundError:
            return Outcome(rank, exitcode, timed_out=late, output=output)
        value, error, message, text = pickle.loads(data)  # from our own child
        return Outcome(rank, exitcode, value, error, message, text, late, output)


def launch(
    world: int,
    target: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    store: StoreHost = "agent",
    env: Mapping[str, str] | None = None,
    nodes: Sequence[Node] = (),
) -> list[Outcome]:
    """Run ``target(*args)``, a function of a module, on every rank of a new world; what became of each.

    `store` says who hosts the process group's store: this process, as the agent of ``torchrun`` does, or
    rank 0, with which it dies. A rank that has not ended after `timeout` seconds is killed. With `nodes` the
    ranks are shared out among these, and rank 0 hosts the store.
    """
    with started(world, target, *args, timeout=timeout, store=store, env=env, nodes=nodes) as ranks:
        return ranks.join()


@contextlib.contextmanager
def started(
    world: int,
    target: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    dump_after: float = DUMP_SECONDS,
    store: StoreHost = "agent",
    env: Mapping[str, str] | None = None,
    nodes: Sequence[Node] = (),
) -> Iterator[Ranks]:
    """As `launch`, for tests that do something from outside meanwhile: kill a rank, for instance.

    Every `dump_after` seconds each rank prints the stacks of its threads; a failing test shows them.
    """
    import torch.distributed as dist

    context = prepared_context()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everystep-ranks-")))
        listener: socket.socket | None = None
        if nodes:
            port = PORT
        elif store == "agent":
            hosted = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            stack.callback(lambda: hosted)  # alive until the ranks have ended
            port = hosted.port
        else:
            # Bound here, so that its port is known; connections queue until rank 0 accepts them.
            listener = stack.enter_context(socket.create_server((HOST, 0), backlog=128))
            port = listener.getsockname()[1]
        call = pickle.dumps((target, args))
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        stack.callback(_end_all, processes)
        for rank in range(world):
            (folder / f"{rank}.output").touch()
            orders = _Orders(
                rank, world, port, timeout, dump_after, call, str(folder), dict(env or {}), tuple(nodes)
            )
            ours, theirs = context.Pipe()
            pipes.append(stack.enter_context(ours))
            with theirs:
                process = context.Process(target=_run, args=(orders, theirs, listener if rank == 0 else None))
                process.start()
            processes.append(process)
            if listener is not None:
                listener.close()  # now only rank 0 has it: who asks after its death is refused
        ranks = Ranks(processes, pipes, folder, time.monotonic() + timeout)
        ranks.gather()
        yield ranks


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values of all ranks; AssertionError with all that is known unless every one succeeded."""
    if not all(outcome.ok for outcome in outcomes):
        raise AssertionError("\n\n".join(outcome.describe() for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


def _end_all(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def prepared_context() -> multiprocessing.context.ForkServerContext:
    """For processes that start with torch loaded, which reads some variables when it is: in the server."""
    context = multiprocessing.get_context("forkserver")
    server = multiprocessing.forkserver._forkserver
    if server._preload_modules != list(_PRELOADED):
        server._stop()  # one that another test has started for itself has nothing loaded
    context.set_forkserver_preload(list(_PRELOADED))
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _run(orders: _Orders, parent: Connection, listener: socket.socket | None) -> None:
    """The whole life of a rank."""
    _redirect(Path(orders.folder, f"{orders.rank}.output"))
    faulthandler.register(_TELL, all_threads=True)
    os.environ.update(_variables(orders))
    failed = False
    try:
        if orders.nodes:
            orders.nodes[orders.node].enter()
        faulthandler.dump_traceback_later(orders.dump_after, repeat=True)  # in a thread: after `enter`
        result: tuple[Any, ...] = (_call(orders, parent, listener), None, "", "")
        data = pickle.dumps(result)
    except BaseException as error:  # SystemExit too: that a target ends its process is an outcome
        failed = True
        data = pickle.dumps((None, type(error).__name__, str(error), traceback.format_exc()))
    result_path = Path(orders.folder, f"{orders.rank}.result")
    result_path.with_suffix(".unfinished").write_bytes(data)
    result_path.with_suffix(".unfinished").rename(result_path)
    if listener is not None or (orders.nodes and orders.rank == 0):
        # The store lives here: the others need it until they have ended.
        with contextlib.suppress(EOFError):
            while parent.recv_bytes():
                continue
    _leave()
    sys.exit(1 if failed else 0)


def _call(orders: _Orders, parent: Connection, listener: socket.socket | None) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    target, args = pickle.loads(orders.call)  # from our own parent
    limit = timedelta(seconds=orders.timeout)
    if listener is None:
        leads = bool(orders.nodes) and orders.rank == 0
        store = dist.TCPStore(
            orders.host, orders.port, is_master=leads, timeout=limit, wait_for_workers=False
        )
    else:
        store = dist.TCPStore(
            HOST,
            orders.port,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    dist.init_process_group("gloo", store=store, rank=orders.rank, world_size=orders.world, timeout=limit)
    parent.send_bytes(b"ready")
    parent.recv_bytes()
    return target(*args)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _variables(orders: _Orders) -> dict[str, str]:
    peers = [
        rank
        for rank in range(orders.world)
        if not orders.nodes or node_of(orders.nodes, rank, orders.world) == orders.node
    ]
    return {
        **_ENVIRONMENT,
        "GLOO_SOCKET_IFNAME": DEVICE if orders.nodes else "lo",
        "MASTER_ADDR": orders.host,
        "MASTER_PORT": str(orders.port),
        "RANK": str(orders.rank),
        "LOCAL_RANK": str(peers.index(orders.rank)),
        "GROUP_RANK": str(orders.node),
        "WORLD_SIZE": str(orders.world),
        "LOCAL_WORLD_SIZE": str(len(peers)),
        **orders.environment,
    }


def _redirect(path: Path) -> None:
    """What this process prints goes to a file: the streams of the server may be those of an earlier test."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of this process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
