"""How many functions a call of Everystep goes through, and how often it changes the folder on the way.

    python tools/walks.py

It counts the Python functions of files under src/everystep. A change is a call in another folder than the
call before it. Each walk runs twice before it is counted, so that imports and probes are over. Of an
overlapped save, the first line counts the training's thread and the second line counts all threads. Of
several ranks, it counts rank 0 and its requests to the process group's store.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import everystep
from everystep import Shelf, universal
from everystep.store.ranks.message_store import MessageStore

PACKAGE = os.path.dirname(everystep.__file__) + os.sep
DEEPSPEED = Path(__file__).parents[1] / "tests/universal/fixtures/deepspeed/z1_fp32_2"
RANKS = 4


class Walk:
    """What was called while `counted` ran."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        """The thread and the folder of each call, in the order in which they began."""

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls.append((threading.get_ident(), os.path.dirname(frame.f_code.co_filename)))

    @contextmanager
    def counted(self) -> Iterator[None]:
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def line(self, name: str, threads: str = "this", more: str = "") -> str:
        """Calls and changes of folder, of this thread or of all, each thread's changes by themselves."""
        by_thread: dict[int, list[str]] = {}
        for thread, folder in self.calls:
            by_thread.setdefault(thread, []).append(folder)
        if threads == "this":
            by_thread = {key: by_thread[key] for key in by_thread if key == threading.get_ident()}
        calls = sum(map(len, by_thread.values()))
        changes = sum(a != b for each in by_thread.values() for a, b in pairwise(each))
        return f"{name:44} {calls:6,} calls {changes:6,} changes{more}"


def walk(call: Callable[[int], object], name: str, threads: str = "this") -> str:
    """Calls three times, with the number of the call, and counts the last one."""
    for number in range(2):
        call(number)
    counted = Walk()
    with counted.counted():
        call(2)
    return counted.line(name, threads)


def one_process(place: Path) -> Iterator[str]:
    state: dict[str, Any] = {"w": np.arange(300.0), "b": np.arange(10.0), "epoch": 7, "name": "x"}
    yield walk(lambda number: everystep.save(place / f"saved-{number}", state), "save, small dict")
    yield walk(lambda number: everystep.load(place / "saved-0"), "load, small dict")
    with Shelf(place / "fit.shelf", size="1MiB") as shelf:
        shelf["centers"] = state["w"]

        def commit(number: int) -> None:
            with shelf.transaction():
                shelf["centers"] = state["w"]

        yield walk(commit, "commit of a shelf")
    yield walk(
        lambda number: universal.convert(DEEPSPEED, place / f"converted-{number}"),
        "convert, DeepSpeed ZeRO-1",
    )


def overlapped(place: Path) -> Iterator[str]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with everystep.Checkpointer(place / "run", {"model": model, "optimizer": optimizer}) as ckpt:

        def train(step: int) -> None:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(1, 4):
            train(step)
            ckpt.save(step).result()
        train(4)
        counted = Walk()
        with counted.counted():
            pending = ckpt.save(4)
            train(5)
            pending.result()
        yield counted.line("overlapped save, the training's thread")
        yield counted.line("overlapped save, all threads", "all")


def several_ranks(place: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    lines = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, place, lines)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        if rank.exitcode:
            raise RuntimeError("a rank failed; what it printed is above")
    while not lines.empty():
        yield lines.get()


def _rank(rank: int, port: int, place: Path, lines: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    state = {"w": torch.arange(300.0), "b": torch.arange(10.0), "epoch": 7, "name": "x"}
    try:
        for number, name in enumerate(("first", "second", "third")):
            dist.barrier()
            with requests() as made:
                counted = Walk()
                with counted.counted():
                    everystep.save(place / f"ranks-{number}", state)
            if rank == 0:
                lines.put(counted.line(f"save by {RANKS} ranks, the {name}", more=f" {len(made):4} requests"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def requests() -> Iterator[list[None]]:
    """One for each request to the process group's store, while the block lasts."""
    made: list[None] = []
    call = MessageStore._call

    def counting(self: MessageStore, *arguments: Any, **named: Any) -> Any:
        made.append(None)
        return call(self, *arguments, **named)

    MessageStore._call = counting
    try:
        yield made
    finally:
        MessageStore._call = call


def main() -> None:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        for walks in (one_process, overlapped, several_ranks):
            for line in walks(Path(place)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
