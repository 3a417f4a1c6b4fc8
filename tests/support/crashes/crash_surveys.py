"""Surveys of more than one life: a process that was killed or cut off, and the one that comes after it."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import everystep
from everystep.engine import faults
from support.crashes import save_sequences as sequences
from support.crashes.crash_tracing import Recording, Survey, Tally
from support.crashes.power_cuts import Budget, Disk, Image
from support.crashes.recovery import Ledger, RunRecovery

FEW = Budget(names=8, torn=0, single=False)


def survey_failing(root: Path, scratch: Path, options: everystep.Options) -> Tally:
    """One call of a save fails, each in turn; then, at any time after that, the power goes."""
    total = Tally()
    survey = Survey(scratch, RunRecovery(), FEW)
    nth = 0
    while True:
        nth += 1
        place = root / str(nth)
        place.mkdir()
        recording = sequences.with_failing_call(place, options, f"any:{nth}:EIO")
        if recording.calls < nth:
            assert nth > 7
            return total  # it had no so many calls: each has failed once
        total.add(survey(recording))


def survey_killed(root: Path, scratch: Path, options: everystep.Options) -> Tally:
    """A process is killed after each operation, another takes over, and at any time then the power goes."""
    first = sequences.brief(root, options)
    total = Tally()
    survey = Survey(scratch, RunRecovery(), FEW)
    disk, ledger = Disk(root), Ledger()
    for item in first.items:
        if not isinstance(item, faults.TracedCall):
            ledger.note(item)
            continue
        disk.replay(item)
        disk.live_image().write(root)
        second = Recording(root)
        sequences.second_life(second, options)
        total.add(survey(second, copy.deepcopy(disk), copy.deepcopy(ledger)))
    return total


def survey_recoveries(root: Path, scratch: Path, options: everystep.Options, sample: int) -> Tally:
    """The power goes; while the run recovers and goes on, it goes again."""
    first = sequences.brief(root, options)
    found: list[tuple[Image, Ledger]] = []
    disk, ledger = Disk(root), Ledger()
    rng = random.Random(1)
    for item in first.items:
        if isinstance(item, faults.TracedCall):
            disk.replay(item)
        else:
            ledger.note(item)
        found += [(image, copy.deepcopy(ledger)) for image in disk.crashes(FEW, rng)]
    total = Tally()
    survey = Survey(scratch, RunRecovery(), FEW)
    for image, promised in rng.sample(found, sample):
        image.write(root)
        second = Recording(root)
        sequences.second_life(second, options)
        total.add(survey(second, Disk(root, image), promised))
    return total
