"""A training without torch that resumes as it should; options make it do so badly.

    python steady.py RUN --steps 30 [--every 5] [--mode snapshot] [--forget-random] ...

Weights are updated with noise from a generator. `--forget-random` leaves that generator out of the state: the
planted nondeterminism that a drill has to find, since a resumed training then draws other noise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from typing import Any

import numpy as np

import everystep


class Noise:
    """A generator that goes on where it stopped."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(7)

    def draw(self, count: int) -> np.ndarray[Any, Any]:
        return self._generator.standard_normal(count)

    def state_dict(self) -> dict[str, Any]:
        return {"bits": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["bits"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--mode", default="sync", choices=["sync", "snapshot"])
    parser.add_argument("--forget-random", action="store_true")
    parser.add_argument("--seed-from-time", action="store_true")
    parser.add_argument("--never-restore", action="store_true")
    parser.add_argument("--ignore-restore", action="store_true")
    parser.add_argument("--new-path", action="store_true")
    parser.add_argument("--fail-on-resume", action="store_true")
    parser.add_argument("--hang-on-resume", action="store_true")
    parser.add_argument("--forget-checkpoints", action="store_true")
    parser.add_argument("--remove-run", action="store_true")
    options = parser.parse_args()

    noise = Noise()
    weights = np.zeros(1000)
    if options.seed_from_time:
        weights += time.time_ns() % 1_000_003
    momentum = np.zeros(1000)
    state: dict[str, Any] = {"weights": weights, "momentum": momentum}
    if not options.forget_random:
        state["rng"] = noise
    run = f"{options.run}-{os.getpid()}" if options.new_path else options.run
    over = options.never_restore
    with everystep.Checkpointer(run, state, mode=options.mode, every=options.every, start_over=over) as ckpt:
        if options.forget_checkpoints and len(ckpt.steps) > 2:
            # What a careless clean-up does: the newest checkpoint is gone, an old one is still there.
            ckpt.restore(ckpt.steps[0])
            completed = ckpt.steps[0]
        else:
            completed = 0 if options.never_restore else ckpt.restore()
        if options.fail_on_resume and completed:
            sys.exit("this script cannot resume")
        if options.hang_on_resume and completed:
            time.sleep(600)
        for step in range(0 if options.ignore_restore else completed, options.steps):
            time.sleep(options.step_seconds)
            momentum *= 0.9
            momentum += noise.draw(1000)
            weights -= 0.1 * momentum
            ckpt.save(step + 1)
    if options.remove_run:
        shutil.rmtree(ckpt.path)


if __name__ == "__main__":
    main()
