"""The orders that ranks follow (`workers.Ranks`): joining a process group, and saving and loading together.

A rank also tells how long it waited for others inside of a save: the time in messages and collectives, of
any system. `WaitingClock` replaces functions of torch for that. Everystep's messages go through the
process group's store, so waiting for them is waiting for a key there.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from everystep_study.harness.costs import cpu_seconds
from everystep_study.mechanisms import competitors, states
from everystep_study.workers.orders import Context

HOST = "127.0.0.1"
_COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
)
_STORE = ("get", "multi_get", "wait")


class WaitingClock:
    """Sums up the seconds in which at least one thread was inside of such a call; they may be nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0

    def install(self) -> None:
        import torch.distributed as dist

        for name in _COLLECTIVES:
            setattr(dist, name, self._timed(getattr(dist, name)))
        kinds: tuple[type, ...] = (dist.Store, dist.TCPStore, dist.PrefixStore)  # type: ignore[attr-defined]
        for kind in kinds:
            for name in _STORE:
                if name in vars(kind):
                    setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._inside += 1
                if self._inside == 1:
                    self._since = time.monotonic()
            try:
                return call(*arguments, **options)
            finally:
                with self._lock:
                    self._inside -= 1
                    if not self._inside:
                        self.seconds += time.monotonic() - self._since

        return timed


def join(context: Context, rank: int, world: int, port: int, nbytes: int, timeout: float) -> dict[str, Any]:
    """Joins the process group, and builds the state, the same on all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    context.at_end.callback(dist.destroy_process_group)
    state = states.build("gpt2", nbytes)
    state.rank, state.timeout, state.in_place = rank, timeout, True
    clock = WaitingClock()
    clock.install()
    context.kept = {"state": state, "clock": clock}
    return {}


def open_mechanism(context: Context, mechanism: str, directory: str) -> dict[str, Any]:
    kind = competitors.storing(mechanism)
    kind.prepare()
    opened = kind(context.kept["state"], Path(directory), durable=True, slots=1)
    context.at_end.callback(opened.close)
    context.kept[mechanism] = opened
    return {}


def save(context: Context, mechanism: str, directory: str) -> dict[str, Any]:
    opened = context.kept[mechanism]
    opened.directory = Path(directory)
    return {**_together(context, opened.save_and_sync), "path": str(opened.path), "own": opened.own_seconds}


def load(context: Context, mechanism: str, directory: str, verify: bool) -> dict[str, Any]:
    """Loads into the state; with `verify` proves that this brings it back."""
    state, opened = context.kept["state"], context.kept[mechanism]
    opened.directory = Path(directory)
    before = {name: _digest(array) for name, array in state.arrays.items()} if verify else {}
    for name in before:
        state.arrays[name][...] = 0
    found = _together(context, opened.load)
    for name, digest in before.items():
        if _digest(state.arrays[name]) != digest:
            raise RuntimeError(f"loaded something else than was saved: {name} differs")
    return {**found, "own": opened.own_seconds}


def _digest(array: states.Array) -> bytes:
    return hashlib.blake2b(states.bytes_of(array).data).digest()


def _together(context: Context, call: Callable[[], object]) -> dict[str, Any]:
    """When it began and ended on this rank, by the clock that all processes of a machine share."""
    import torch.distributed as dist

    clock: WaitingClock = context.kept["clock"]
    dist.barrier()
    waited, began, cpu = clock.seconds, time.monotonic(), cpu_seconds()
    call()
    return {
        "began": began,
        "ended": time.monotonic(),
        "cpu_seconds": cpu_seconds() - cpu,
        "waiting_seconds": clock.seconds - waited,
    }


def seconds_of(answers: list[dict[str, Any]]) -> float:
    """How long it took: by a clock of the mechanism, or from the first beginning to the last end."""
    own = [answer["own"] for answer in answers if answer["own"] is not None]
    if own:
        return float(max(own))
    return float(max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers))
