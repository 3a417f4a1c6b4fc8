"""How far a checkpoint can be hidden: overhead as it grows relative to forward and backward.

FastPersist hides a checkpoint of S bytes behind the forward and backward of the next step when the device
writes at B >= S/(Tf + Tb); beyond that the optimizer waits for what is left. Here the right side is moved
from well inside to well beyond what the device does: first fewer tokens per step (Tf + Tb shrinks, S stays),
then, where no step can be shorter, frozen parameters (S grows). The bandwidth is taken in the same run, from
a raw write of the same size and from Holdfast's own durable save with nothing beside it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.study.peers import remove
from holdfast.study.results import Spread
from holdfast.study.training.arms import Arm, Nothing, Overlap, Sync
from holdfast.study.training.measure import FIRST_LEAD_IN, Meter
from holdfast.study.training.model import Load, Trainer
from holdfast.study.training.results import NONE, OVERLAP, SYNC, StepSample, SweepPoint, predicted_stall

SHORTEST_SEQUENCE = 8
_BANDWIDTH_READINGS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A point of the sweep: how much is computed, and how many times the model's own state is saved."""

    load: Load
    copies: int = 1


def places(base: Load, *, quick: bool = False) -> list[Place]:
    """From half the load of the benchmark, whose own is in its table, down to hardly any; then up in size."""
    shortest = Load(1, min(SHORTEST_SEQUENCE, base.sequence))
    if quick:
        return [Place(base), Place(shortest), Place(shortest, 3)]
    loads = [Load(max(1, base.batch // 2), base.sequence), Load(1, base.sequence)]
    loads += [Load(1, max(shortest.sequence, base.sequence // 4)), shortest]
    different = list(dict.fromkeys(loads))
    return [*(Place(load) for load in different), Place(shortest, 2), Place(shortest, 4)]


def run(
    trainer: Trainer,
    wanted: Sequence[Place],
    directory: Path,
    *,
    rounds: int,
    steps: int,
    overlap: Callable[[], Arm] = Overlap,
    progress: Callable[[Place], None] = lambda place: None,
) -> tuple[SweepPoint, ...]:
    """Training with and without checkpoints in turns, at each place; the trainer's state grows on the way."""
    meter = Meter(trainer, directory)
    own_nbytes = trainer.nbytes
    copies = 0
    points = []
    raw_seconds = own_seconds = 0.0
    for place in wanted:
        progress(place)
        if place.copies != copies:
            if copies:
                trainer.grow((place.copies - copies) * own_nbytes)
                remove(directory / OVERLAP)  # checkpoints of another size: nothing to recycle, and in the way
            copies = place.copies
            raw_seconds, own_seconds = _write_seconds(meter, trainer, place.load, directory)
            meter.block(overlap(), place.load, 1, lead_in=FIRST_LEAD_IN)  # files to write over, as later on
        samples = _measure(meter, place.load, overlap(), rounds, steps)
        points.append(_point(place.load, trainer.nbytes, raw_seconds, own_seconds, *samples))
    return tuple(points)


def _write_seconds(meter: Meter, trainer: Trainer, load: Load, directory: Path) -> tuple[float, float]:
    """How long this state takes to the device: raw, and as a durable save."""
    from holdfast import engine

    raw, own = [], []
    path = directory / "raw"
    for _ in range(_BANDWIDTH_READINGS):
        os.sync()
        raw.append(engine.raw_write(path, trainer.nbytes))
        path.unlink()
        samples, _ = meter.block(Sync(), load, 1)
        own += [sample.save_seconds for sample in samples]
    remove(directory / SYNC)
    return statistics.median(raw), statistics.median(own)


def _measure(
    meter: Meter, load: Load, overlap: Arm, rounds: int, steps: int
) -> tuple[list[StepSample], list[StepSample]]:
    plain: list[StepSample] = []
    saved: list[StepSample] = []
    for round_index in range(1, rounds + 1):
        arms = (Nothing(), overlap) if round_index % 2 else (overlap, Nothing())
        for position, arm in enumerate(arms):
            samples, _ = meter.block(arm, load, steps, round_index=round_index, position=position)
            (plain if arm.key == NONE else saved).extend(samples)
    return plain, saved


def _point(
    load: Load,
    nbytes: int,
    raw_seconds: float,
    own_seconds: float,
    plain: Sequence[StepSample],
    saved: Sequence[StepSample],
) -> SweepPoint:
    # From the training without checkpoints: that of the other is the longer for what it shares.
    compute = statistics.median(sample.compute_seconds for sample in plain)
    return SweepPoint(
        batch=load.batch,
        sequence=load.sequence,
        state_nbytes=nbytes,
        raw_seconds=raw_seconds,
        own_seconds=own_seconds,
        compute_seconds=compute,
        plain_step_seconds=Spread.of([sample.seconds for sample in plain]),
        step_seconds=Spread.of([sample.seconds for sample in saved]),
        stall_seconds=Spread.of([sample.stall_seconds for sample in saved]),
        predicted_raw_seconds=predicted_stall(nbytes, nbytes / raw_seconds, compute),
        predicted_own_seconds=predicted_stall(nbytes, nbytes / own_seconds, compute),
    )
