"""Ranks that save, or do not, as they like: whatever they missed, the next save that all come to succeeds."""

from __future__ import annotations

import random
from pathlib import Path

from support.worlds.disturbed_trainings import Mode, advance, error_of
from support.worlds.rank_troubles import Bench, bench

_ODD = object()


def wander(run: Path, mode: Mode, seed: int, rounds: int) -> list[str]:
    """Every rank has its own mind for a few steps, then all come together; what was wrong then."""
    with bench(run, mode) as here:
        mind = random.Random(seed * 1000 + here.rank)
        common = random.Random(seed)
        for number in range(rounds):
            steps = common.randint(1, 3)
            before = here.step
            with here.impatient(0.4):
                for _ in range(steps):
                    _do(here, mind.choice(("save", "save", "skip", "odd", "twice")))
            here.step = before + steps
            if common.random() < 0.2:
                here.checkpointer.restore()
                here.step = here.checkpointer.steps[-1]
            here.recover(f"round {number}")
        return here.notes


def _do(here: Bench, what: str) -> None:
    if what == "skip":
        here.step += 1
        advance(here.state)
        return
    if what == "odd":
        here.state["odd"] = _ODD
    error_of(here.save)
    here.state.pop("odd", None)
    if what == "twice":
        error_of(lambda: here.checkpointer.save(here.step))
    error_of(here.checkpointer.wait)
