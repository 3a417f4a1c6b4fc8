"""Real ranks on this machine: started, given orders, and ended, whatever happens.

Ranks are processes of their own (`rank`) in a gloo process group over the loopback device. This process
hosts the group's store, as the agent of ``torchrun`` does.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from everystep_study.child import Child, NoAnswer, answers
from everystep_study.peers.base import remove
from everystep_study.rank import HOST, Answer, Order

_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # torch looks up the names of its peers, and waits for name servers that do not answer.
    "RES_OPTIONS": "timeout:1 attempts:1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
_END_SECONDS = 10.0
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 1.0


class RankEnded(RuntimeError):
    """A rank failed, ended or took too long. The others of its world are of no use then."""


class World(AbstractContextManager["World"]):
    """`size` ranks, each with the same state of `nbytes`. An order may take `timeout` seconds, and no order
    may take longer than until `end` (of `time.monotonic`).
    """

    def __init__(self, size: int, nbytes: int, logs: Path, timeout: float, end: float = math.inf) -> None:
        self.size = size
        self._timeout, self._end = timeout, end
        self._decoder = msgspec.json.Decoder(Answer)
        self._ranks: list[Child] = []
        self._store = _host_a_store()
        try:
            for rank in range(size):
                log = logs / f"rank-{rank}.log"
                self._ranks.append(_start(rank, size, self._store.port, nbytes, timeout, log))
            self._answers()
        except BaseException:
            self.kill()
            raise

    def tell(self, order: Order) -> list[Answer]:
        """Every rank follows the order; answers by rank. `RankEnded` when one does not, and all end."""
        line = msgspec.json.encode(order)
        try:
            for rank in self._ranks:
                rank.send(line)
            return self._answers()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """All ranks end by themselves."""
        self.tell(Order("stop"))
        for rank in self._ranks:
            rank.finish(_END_SECONDS)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._ranks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _answers(self) -> list[Answer]:
        """One answer of every rank, within the time."""
        found: dict[int, Answer] = {}
        limit = max(0.0, min(self._timeout, self._end - time.monotonic()))
        try:
            for rank, line in answers(self._ranks, limit):
                found[rank] = self._decode(rank, line)
        except NoAnswer as error:
            raise RankEnded(f"rank {error.which} {error}") from None
        return [found[rank] for rank in range(self.size)]

    def _decode(self, rank: int, line: bytes) -> Answer:
        answer = self._decoder.decode(line)
        if answer.failure is not None:
            raise RankEnded(self._first_to_end() or f"rank {rank}: {answer.failure}")
        return answer

    def _first_to_end(self) -> str | None:
        """The rank that has ended, if one has: what others say is then only that they miss it."""
        end = time.monotonic() + _GRACE_SECONDS  # sockets close a moment before a process is gone
        while True:
            for number, rank in enumerate(self._ranks):
                if rank.ended():
                    return f"rank {number} {rank.how_it_ended()}"
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)


def seconds_of(answers: Sequence[Answer]) -> float:
    """How long an operation took: by a clock of its own, or from the first beginning to the last end."""
    own = [answer.seconds for answer in answers if answer.seconds is not None]
    if own:
        return max(own)
    return max(answer.ended for answer in answers) - min(answer.began for answer in answers)


class RestartedWorld:
    """A world that is started when it is first needed, and again after a rank has failed."""

    def __init__(self, size: int, nbytes: int, folder: Path, timeout: float, end: float = math.inf) -> None:
        self.size = size
        self._nbytes, self._folder, self._timeout, self._end = nbytes, folder, timeout, end
        self._world: World | None = None
        self._prepared: set[str] = set()
        self._starts = 0
        self._why_not: str | None = None
        self._made: list[Path] = []

    def tell(self, order: Order) -> list[Answer]:
        """`RankEnded` when a rank does not follow the order; the next order starts a new world."""
        world = self._ranks()
        try:
            return world.tell(order)
        except RankEnded:
            self._world = None
            raise

    def prepare(self, peer: str) -> None:
        """Once per world."""
        self._ranks()
        if peer not in self._prepared:
            self.tell(Order("prepare", peer, str(self._directory(peer))))
            self._prepared.add(peer)

    def close(self, *, politely: bool) -> None:
        """Ends the ranks and removes what they had on the disk. `RankEnded` when one does not end well."""
        world, self._world = self._world, None
        try:
            if world is not None:
                with world:
                    if politely:
                        world.stop()
        finally:
            for directory in self._made:
                remove(directory)

    def _ranks(self) -> World:
        if self._why_not is not None:
            raise RankEnded(self._why_not)  # once is enough: it may have taken all of the time-out
        if self._world is None:
            self._starts += 1
            self._prepared.clear()
            try:
                logs = self._directory("logs")
                self._world = World(self.size, self._nbytes, logs, self._timeout, self._end)
            except RankEnded as error:
                self._why_not = f"{self.size} ranks could not be started: {error}"
                raise RankEnded(self._why_not) from error
        return self._world

    def _directory(self, name: str) -> Path:
        directory = self._folder / f"{name}-of-{self.size}-{self._starts}"
        directory.mkdir()
        self._made.append(directory)
        return directory


def _host_a_store() -> Any:
    import torch.distributed as dist

    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _start(rank: int, world: int, port: int, nbytes: int, timeout: float, log: Path) -> Child:
    command = [sys.executable, "-m", "everystep_study.rank", "--timeout", str(timeout)]
    for name, value in (("rank", rank), ("world", world), ("port", port), ("nbytes", nbytes)):
        command += [f"--{name}", str(value)]
    return Child(command, log, _ENVIRONMENT)
