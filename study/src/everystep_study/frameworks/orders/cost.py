"""The orders of the suite ``cost``: a training with and without checkpoints, and the parts of one save.

All clocks of these are here. Rounds, and what the page cache and the disk are like before a turn, are the
harness's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from everystep_study.costs import wall_seconds
from everystep_study.frameworks.api import LoopFramework, Mechanism, Training
from everystep_study.frameworks.orders.context import Context
from everystep_study.peers.base import remove
from everystep_study.results import SECONDS

LONG_SECONDS = 2.0
"""Saves that take longer are not repeated before the clock starts: what one of them finds out is the same."""
SLOW_SECONDS = 10.0
"""A save that takes longer is made once in a turn."""


def train(
    context: Context, mechanism: str, durable: bool, every: list[int], steps: int, directory: str
) -> dict[str, Any]:
    """So many steps without checkpoints; for each frequency as many with one after each `every` steps;
    as many without again. Answers readings by frequency.

    Some saves are made before the clock starts: what is measured is the middle of a training, in which
    every name has been written before, and a save that is due may have to wait for the one before it.
    """
    if isinstance(context.framework, LoopFramework):
        return _train_loop(context.framework, mechanism, durable, every, steps, Path(directory))
    training = context.training

    def train_only() -> float:
        return wall_seconds(lambda: [training.step() for _ in range(steps)])

    before = train_only()
    with context.opened(mechanism, directory, durable=durable, slots=2) as opened:
        slow = settling = 0.0
        for _ in range(opened.slots + 1):
            slow = wall_seconds(opened.save_and_sync)
            settling += slow
            if settling > LONG_SECONDS:
                break
        if slow > SLOW_SECONDS and not opened.background:
            # Nothing overlaps with it, so it costs what it takes: once is enough.
            alone = {**_compared(before + slow, before, 1), "call_seconds": slow}
            return {
                str(each): {**alone, "lost_percent": 100 * slow / (before * each / steps)} for each in every
            }
        blocks = [_block(training, opened, each, steps) for each in every]
    base = (before + train_only()) / 2
    found = {}
    for each, (seconds, called, drained) in zip(every, blocks, strict=True):
        saves = steps // each
        found[str(each)] = {
            **_compared(seconds, base, saves),
            "call_seconds": called / saves,
            "drain_seconds": drained,
        }
    return found


def _block(training: Training, opened: Mechanism, every: int, steps: int) -> tuple[float, float, float]:
    """Steps with checkpoints: all seconds, those in saves, and those until the last was written."""
    called = 0.0
    began = time.perf_counter()
    for step in range(1, steps + 1):
        training.step()
        if step % every == 0:
            called += wall_seconds(opened.save_and_sync)
    return time.perf_counter() - began, called, wall_seconds(opened.wait)


def _train_loop(
    framework: LoopFramework, mechanism: str, durable: bool, every: list[int], steps: int, directory: Path
) -> dict[str, Any]:
    def seconds_of(mechanism: str, every: int) -> float:
        directory.mkdir(parents=True)
        try:
            return framework.loop(mechanism, durable, every, steps, directory)
        finally:
            remove(directory)

    before = seconds_of("", 1)
    blocks = [seconds_of(mechanism, each) for each in every]
    base = (before + seconds_of("", 1)) / 2
    return {
        str(each): _compared(seconds, base, steps // each)
        for each, seconds in zip(every, blocks, strict=True)
    }


def split(context: Context, mechanism: str, directory: str, memory: str) -> dict[str, float]:
    """Where the time of one durable save goes, found from outside, the same way for all.

    Serialising: all of a save into a filesystem in memory. Writing: how much longer the same takes on the
    disk. Syncing: what it then takes to make it durable. Each is timed at the second save in its
    directory; a long one at the first.
    """
    found = {}
    for name, place in (("memory", memory), ("disk", directory)):
        if not place:
            continue
        try:
            with context.opened(mechanism, place, durable=False, slots=2) as opened:
                for _ in range(2):
                    found[name] = wall_seconds(opened.save) + wall_seconds(opened.wait)
                    found[f"{name} sync"] = opened.own_sync_seconds()
                    if name == "disk" and not opened.always_durable:
                        found["disk sync"] = wall_seconds(opened.sync)
                    if found[name] > LONG_SECONDS:
                        break
        finally:
            remove(Path(place))
    inner = context.mechanisms[mechanism].always_durable
    save = found["disk"] - (found["disk sync"] if inner else 0.0)
    readings = {"save_seconds": found["disk"], "sync_seconds": found["disk sync"]}
    if "memory" in found:
        readings["serialise_seconds"] = min(found["memory"], save)
        readings["write_seconds"] = max(0.0, save - found["memory"])
    return readings


def _compared(seconds: float, base: float, saves: int) -> dict[str, float]:
    """A training with checkpoints, and the same one without."""
    return {
        SECONDS: seconds,
        "base_seconds": base,
        "saves": saves,
        "stall_seconds": (seconds - base) / saves,
        "lost_percent": 100 * (seconds - base) / base,
    }
