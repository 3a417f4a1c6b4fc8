"""SIGKILL at random moments of a training that saves every step: at most one step is lost, never a wrong bit.

The parent has torch loaded and forks a child for each attempt, so that a kill costs milliseconds. The child
trains on from whatever the run holds and reports each completed step through a pipe before it goes on.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep import Checkpointer, Keep, Options
from support.states.small_trainings import advance, build, digest

pytestmark = pytest.mark.race

WIDTH = 500
TIMEOUT = 240
_RECORD = struct.Struct("<i")


def reference(steps: int) -> list[str]:
    """The digest after each number of steps."""
    state = build(WIDTH)
    found = [""]
    for _ in range(steps):
        advance(state, WIDTH)
        found.append(digest(state))
    return found


def train(run: Path, steps: int, mode: Any, pipe: int, pause: float) -> None:
    options = Options(backend="threads", memory_nbytes=66 << 20)
    state = build(WIDTH)
    with Checkpointer(run, state, mode=mode, options=options, keep=Keep(last=2)) as ckpt:
        completed = ckpt.restore()
        os.write(pipe, _RECORD.pack(-1 - completed))
        for step in range(completed + 1, steps + 1):
            advance(state, WIDTH)
            os.write(pipe, _RECORD.pack(step))
            ckpt.save(step)
            time.sleep(pause)


@dataclass
class Attempt:
    resumed: int | None = None
    completed: int = 0
    status: int = 0


def attempt(run: Path, steps: int, mode: Any, kill_after: float, pause: float) -> Attempt:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            train(run, steps, mode, writer, pause)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    found = Attempt()
    deadline = time.monotonic() + TIMEOUT
    started = None
    os.set_blocking(reader, False)
    tail = b""
    ended = False
    while not ended:
        assert time.monotonic() < deadline, "the child hangs"
        if started is not None and time.monotonic() - started >= kill_after:
            os.kill(child, signal.SIGKILL)
            started = None
        try:
            got = os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.0005)
            continue
        ended = not got
        tail += got
        while len(tail) >= _RECORD.size:
            (value,) = _RECORD.unpack(tail[: _RECORD.size])
            tail = tail[_RECORD.size :]
            if value < 0:
                found.resumed = -1 - value
                started = time.monotonic()
            found.completed = max(found.completed, value if value > 0 else -1 - value)
    os.close(reader)
    found.status = os.waitpid(child, 0)[1]
    return found


def drill(run: Path, kills: int, mode: Any, seed: int) -> tuple[int, int]:
    """Trains until `kills` kills have hit. Returns how many steps were lost in all, and the most at once."""
    draw = random.Random(seed)
    steps = 10_000
    expected = reference(kills * 8)
    lost_in_all = worst = 0
    completed = 0
    for _ in range(kills):
        found = attempt(run, steps, mode, draw.uniform(0.0, 0.12), draw.choice([0.0, 0.0, 0.02]))
        assert os.WIFSIGNALED(found.status), f"the child ended by itself: {found}"
        if found.resumed is not None:
            lost = completed - found.resumed
            worst, lost_in_all = max(worst, lost), lost_in_all + lost
            completed = found.completed
        state = build(WIDTH)
        with Checkpointer(run, state, mode="sync", keep=Keep(last=2)) as ckpt:
            durable = ckpt.restore()
            while durable >= len(expected):
                expected = reference(2 * len(expected))
                ckpt.restore()
            assert durable == 0 or digest(state) == expected[durable], f"wrong bits at step {durable}"
            worst = max(worst, completed - durable)
        assert not [name for name in os.listdir(run) if name.endswith((".partial", ".retired"))]
    return lost_in_all, worst


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_kill_at_any_moment_costs_at_most_one_step_and_no_bit(tmp_path: Path, mode: str) -> None:
    torch.set_num_threads(1)  # a forked child has no worker threads
    _, worst = drill(tmp_path, 12, mode, seed=1)
    assert worst <= 1


@pytest.mark.crash_large
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_two_hundred_kills_cost_at_most_one_step_each(tmp_path: Path, mode: str) -> None:
    torch.set_num_threads(1)
    lost, worst = drill(tmp_path, 200, mode, seed=2)
    print(f"\n200 kills in mode {mode}: {lost} steps lost in all, at most {worst} at once")
    assert worst <= 1
