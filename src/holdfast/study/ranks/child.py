"""One rank of a measured world: ``python -m holdfast.study.ranks.child``, started by `world`.

Joins the process group, builds the state, and does what it is told on its standard input, one order at a
time; all ranks get the same orders and begin each together. It ends when the orders do,
at the latest with its parent.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec

from holdfast.format.checksums import digest
from holdfast.study import states
from holdfast.study.measure import reason
from holdfast.study.ranks.orders import Answer, Did, Failed, Load, Order, Prepare, Save, Stop
from holdfast.study.ranks.systems import Ended, Rank, System, make

HOST = "127.0.0.1"


class Child:
    """What a rank keeps from order to order."""

    def __init__(self, me: Rank) -> None:
        self._me = me
        self._systems: dict[str, System] = {}
        self._digests: dict[str, str] = {}

    def obey(self, order: Order) -> Did:
        import torch.distributed as dist

        if isinstance(order, Stop):
            for one in self._systems.values():
                one.stop()
            return Did(0.0, 0.0)
        system = self._systems.get(order.system)
        if system is None:
            system = self._systems[order.system] = make(order.system, self._me)
        if isinstance(order, Load) and order.verify:
            self._spoil()
        dist.barrier()
        began = time.monotonic()
        ended = self._do(system, order)
        answer = Did(began, time.monotonic(), None if ended.path is None else str(ended.path), ended.seconds)
        if isinstance(order, Load) and order.verify:
            self._verify()
        return answer

    def _do(self, system: System, order: Prepare | Save | Load) -> Ended:
        if isinstance(order, Prepare):
            system.prepare(Path(order.directory))
            return Ended()
        if isinstance(order, Save):
            return system.save(Path(order.path))
        return system.load(Path(order.path))

    def _spoil(self) -> None:
        """Forgets the state but for its digests, so that only a load can bring it back."""
        arrays = self._me.state.arrays
        if not self._digests:
            self._digests = {name: _digest(array) for name, array in arrays.items()}
        for array in arrays.values():
            array[...] = 0

    def _verify(self) -> None:
        for name, array in self._me.state.arrays.items():
            if _digest(array) != self._digests[name]:
                raise RuntimeError(f"loaded something else than was saved: {name} differs")


def _digest(array: states.Array) -> str:
    return digest(array.reshape(-1).view("u1").data)


def serve(rank: int, world: int, port: int, nbytes: int, timeout: float) -> None:
    """Does what it is told until it is told to stop, or nobody is there to tell it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    child = Child(Rank(rank, states.build("gpt2", nbytes), timeout))
    answer_with(Did(0.0, time.monotonic()))
    decoder = msgspec.json.Decoder(Order)
    for line in sys.stdin.buffer:
        order = decoder.decode(line)
        try:
            answer: Answer = child.obey(order)
        except Exception as error:  # whatever a system can raise: it is reported, and the parent ends all
            answer = Failed(reason(error))
        answer_with(answer)
        if isinstance(order, Stop):
            break
    dist.destroy_process_group()


def answer_with(answer: Answer) -> None:
    os.write(_answers, msgspec.json.encode(answer) + b"\n")


_answers = 1
"""Where answers go: what was standard output. Whatever libraries print goes to standard error."""


def main() -> None:
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)
    parser = argparse.ArgumentParser(prog="python -m holdfast.study.ranks.child", description=serve.__doc__)
    for name in ("rank", "world", "port", "nbytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    serve(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
