"""One rank of a measured world: ``python -m everystep_study.rank``, started by `world`.

Joins the process group, builds the state, and follows the orders on its standard input, one JSON message per
line. All ranks get the same orders and begin each together. It ends when the orders end, at the latest with
its parent.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from everystep_study import peers, states
from everystep_study.costs import cpu_seconds
from everystep_study.peers.base import Done, Member, Peer
from everystep_study.peers.storing import RecycledEverystep
from everystep_study.waiting import WaitingClock

HOST = "127.0.0.1"
WRITERS = "writers-"
"""``writers-2`` is a `Checkpointer` in which two ranks write."""


class Order(msgspec.Struct, frozen=True):
    """`path` is where to save or what to load; of "prepare" a directory of the peer's own.

    `verify` makes a load prove that it brings the state back.
    """

    do: Literal["prepare", "save", "load", "stop"]
    peer: str = ""
    path: str = ""
    verify: bool = False


class Answer(msgspec.Struct, frozen=True):
    """When it began and ended on this rank, by the clock that all processes of a machine share.

    `path` is where it was saved; `seconds` is set where the system read a clock of its own. `waiting_seconds`
    were spent in messages and collectives.
    """

    began: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    waiting_seconds: float = 0.0
    path: str | None = None
    seconds: float | None = None
    failure: str | None = None


class Rank:
    """What a rank keeps from order to order."""

    def __init__(self, member: Member, state: states.State) -> None:
        self._member = member
        self._state = state
        self._peers: dict[str, Peer] = {}
        self._kept: dict[str, int] = {}
        self._waiting = WaitingClock()
        self._waiting.install()

    def follow(self, order: Order) -> Answer:
        import torch.distributed as dist

        if order.do == "stop":
            for peer in self._peers.values():
                peer.stop()
            return Answer()
        peer = self._peers.get(order.peer) or self._peers.setdefault(order.peer, self._make(order.peer))
        if order.verify:
            self._forget_state()
        dist.barrier()
        waited, began, cpu = self._waiting.seconds, time.monotonic(), cpu_seconds()
        done = self._do(peer, order)
        ended, cpu, waited = time.monotonic(), cpu_seconds() - cpu, self._waiting.seconds - waited
        if order.verify:
            self._verify_state()
        return Answer(began, ended, cpu, waited, str(done.path), done.seconds)

    def _make(self, key: str) -> Peer:
        if key.startswith(WRITERS):
            return RecycledEverystep(self._member, writers=int(key.removeprefix(WRITERS)))
        return peers.STORING[key](self._member)

    def _do(self, peer: Peer, order: Order) -> Done:
        path = Path(order.path)
        if order.do == "prepare":
            peer.start(path, self._state)
            return Done(path)
        return peer.save(path, self._state) if order.do == "save" else peer.load(path, into=self._state)

    def _forget_state(self) -> None:
        """Zeroes the state and keeps its hashes, so that only a load can bring it back."""
        for name, array in self._state.arrays.items():
            self._kept.setdefault(name, _hash(array))
            array[...] = 0

    def _verify_state(self) -> None:
        for name, array in self._state.arrays.items():
            if _hash(array) != self._kept[name]:
                raise RuntimeError(f"loaded something else than was saved: {name} differs")


def _hash(array: states.Array) -> int:
    return hash(np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes())


def serve(rank: int, world: int, port: int, nbytes: int, timeout: float, answers: int) -> None:
    """Follows orders until it is told to stop, or nobody is left to give any."""
    import torch
    import torch.distributed as dist

    def answer_with(answer: Answer) -> None:
        os.write(answers, msgspec.json.encode(answer) + b"\n")

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    me = Rank(Member(rank, world, timeout), states.build("gpt2", nbytes))
    answer_with(Answer())
    decoder = msgspec.json.Decoder(Order)
    for line in sys.stdin.buffer:
        order = decoder.decode(line)
        try:
            answer_with(me.follow(order))
        except Exception as error:  # whatever a system can raise: it is reported, and the parent ends all
            answer_with(Answer(failure=f"{type(error).__name__}: {error}"))
        if order.do == "stop":
            break
    dist.destroy_process_group()


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    parser = argparse.ArgumentParser(prog="python -m everystep_study.rank", description=serve.__doc__)
    for name in ("rank", "world", "port", "nbytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    serve(**vars(parser.parse_args()), answers=answers)


if __name__ == "__main__":
    main()
