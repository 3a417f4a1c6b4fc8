"""A training under signals whose handler raises, at random moments. A script: MODE SIGNALS RUN.

Each array of its state has equal elements at any moment, so a torn checkpoint shows. It ends by SIGTERM,
which must be heard, with the exit code 7 of its Checkpointer.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import numpy as np

import everystep
from everystep import EverystepError, SaveFailed

SECONDS = 60.0
"""Without a signal or a step, this is a hang."""
LONGEST = (0.001, 0.01, 0.1)
T = TypeVar("T")


class Struck(BaseException):
    """As `KeyboardInterrupt`, but only this test raises it."""


class Storm:
    """Of signals. `left`: how many more are to raise; storing 0 there is one step, and ends it."""

    left = 0
    struck = 0


def strike(number: int, frame: FrameType | None) -> None:
    if not Storm.left:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    else:
        Storm.left -= 1
        Storm.struck += 1
        raise Struck


def arm() -> None:
    """One signal soon, and now and then another few right behind it."""
    several = random.random() < 0.3
    behind = random.uniform(5e-5, 1e-3) if several else 0.0
    Storm.left = random.randint(2, 5) if several else 1
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, random.choice(LONGEST)), behind)


def certainly(act: Callable[[], T]) -> T:
    """The result of a call that is struck again and again, once it comes through."""
    while True:
        try:
            arm()
            result = act()
            Storm.left = 0
            return result
        except Struck:
            Storm.left = 0


def make_state(mode: str) -> tuple[dict[str, Any], Any]:
    if mode != "overlap":
        arrays = {name: np.zeros(300_000, np.float32) for name in "abc"}

        def step() -> None:
            for array in arrays.values():
                array += 1

        return {"arrays": arrays}, step
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(300_000)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = -torch.ones(300_000)
    buffer = torch.zeros(300_000)

    def step_of_torch() -> None:
        buffer.add_(1)
        optimizer.step()

    return {"parameters": parameters, "buffer": buffer, "optimizer": optimizer}, step_of_torch


def open_files() -> collections.Counter[str]:
    """What the descriptors of this process refer to."""
    found: collections.Counter[str] = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def require_whole(run: str) -> None:
    loaded = everystep.open(run).read(framework="numpy")
    torn = [name for name, array in loaded.items() if (array != array.flat[0]).any()]
    assert not torn, f"torn: {torn}"


def main(mode: Any, signals: int, run: str) -> None:
    random.seed(f"{mode}{signals}")
    warnings.simplefilter("ignore")
    state, train = make_state(mode)
    options = everystep.Options(backend="buffered", memory_nbytes=2 << 20)
    signal.signal(signal.SIGALRM, strike)

    def opened() -> everystep.Checkpointer:
        return everystep.Checkpointer(
            run, state, mode=mode, options=options, timeout=SECONDS, preemption_exit_code=7
        )

    errors: collections.Counter[str] = collections.Counter()
    ckpt = opened()
    step = ckpt.restore()
    before = open_files()
    saved = 0
    while Storm.struck < signals:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        step += 1
        try:
            arm()
            train()
            ckpt.save(step)
            train()
            Storm.left = 0
            saved += 1
        except Struck:
            Storm.left = 0
        except EverystepError as error:
            Storm.left = 0
            errors[type(error).__name__] += 1
        if step % 50 == 0 and ckpt.steps:
            require_whole(run)
    step += 1
    for attempt in range(3):
        try:
            ckpt.save(step + attempt)
            ckpt.wait()
            break
        except SaveFailed:
            continue
    else:
        raise SystemExit("it saves no more")
    require_whole(run)
    assert ckpt.last_durable == step + attempt
    gc.collect()
    left = open_files() - before
    assert len(left) < 4, f"left open: {left}"
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    certainly(ckpt.close)
    ckpt = certainly(opened)
    assert certainly(ckpt.restore) == step + attempt
    print(f"{Storm.struck} signals, {step} calls, {saved} undisturbed, {dict(errors)}", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    ckpt.save(step + 5)
    raise SystemExit("SIGTERM was not heard")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
