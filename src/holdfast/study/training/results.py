"""What a training benchmark measured, as typed records that are also its JSON form, and what follows from it.

No measuring and no judging here. `results` has the records that all benchmarks share.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from holdfast.study.results import Bar, Machine, Spread, Status

NONE = "none"
OVERLAP = "overlap"
SNAPSHOT = "snapshot"
SYNC = "sync"
TORCH = "torch"
DCP_ASYNC = "dcp-async"
CHECKFREQ = "checkfreq"

HOLDFAST_COLD = "holdfast"
TORCH_WARM = "torch-warm"
TORCH_COLD = "torch-cold"


class StepSample(msgspec.Struct, frozen=True):
    """One step of one arm: forward and backward, waiting for an earlier save, the update, and the save call.

    `lost_*` are the completed steps that a crash would have undone: right after the update, when the state
    is newest and its save has not begun, and when the save call has returned. None: all of them.
    `others_cpu_seconds` is what the machine's CPUs did meanwhile for anyone but this process; None where the
    kernel does not tell.
    """

    round: int
    position: int
    compute_seconds: float
    wait_seconds: float
    update_seconds: float
    save_seconds: float
    cpu_seconds: float
    others_cpu_seconds: float | None
    lost_after_update: int | None
    lost_at_end: int | None

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.wait_seconds + self.update_seconds + self.save_seconds

    @property
    def stall_seconds(self) -> float:
        """Time in which the training thread did nothing for training."""
        return self.wait_seconds + self.save_seconds


class ArmSummary(msgspec.Struct, frozen=True):
    """What a row of the table says; every number follows from the samples of the same run.

    `ratio` is that of the median steps, to training without checkpoints; `ratio_by_round` the same within
    each round. `extra_peak_nbytes` is the growth of resident memory in the worst block beyond what training
    itself grows by.
    """

    step_seconds: Spread
    ratio: float
    ratio_by_round: Spread
    stall_share: Spread
    compute_seconds: float
    wait_seconds: float
    update_seconds: float
    save_seconds: float
    cpu_seconds: Spread
    lost_typical: float | None
    lost_worst: int | None
    extra_peak_nbytes: int | None


class ArmRow(msgspec.Struct, frozen=True):
    """One arm; `reason` says why when it was not measured."""

    arm: str
    title: str
    status: Status
    reason: str = ""
    samples: tuple[StepSample, ...] = ()
    peak_growth_nbytes: tuple[int, ...] = ()
    summary: ArmSummary | None = None


class SweepPoint(msgspec.Struct, frozen=True):
    """One load of training: how long forward and backward take beside the time the device needs.

    The two predictions are ``max(0, S/B - (Tf + Tb))``, with the bandwidth of a raw write and with that of
    Holdfast's own durable save.
    """

    batch: int
    sequence: int
    state_nbytes: int
    raw_seconds: float
    own_seconds: float
    compute_seconds: float
    plain_step_seconds: Spread
    step_seconds: Spread
    stall_seconds: Spread
    predicted_raw_seconds: float
    predicted_own_seconds: float

    @property
    def pressure(self) -> float:
        """S/B over Tf+Tb: below 1 the device can write a checkpoint within one forward and backward."""
        return self.own_seconds / self.compute_seconds

    @property
    def ratio(self) -> float:
        return self.step_seconds.median / self.plain_step_seconds.median


class Restart(msgspec.Struct, frozen=True):
    """From the start of a new process to the end of its first step, in the order in which it happens."""

    import_seconds: float
    build_seconds: float
    restore_seconds: float
    step_seconds: float
    lost: int

    @property
    def seconds(self) -> float:
        return self.import_seconds + self.build_seconds + self.restore_seconds + self.step_seconds


class RecoveryRow(msgspec.Struct, frozen=True):
    """How long one way of recovering took, each time a training was killed."""

    system: str
    title: str
    status: Status
    reason: str = ""
    samples: tuple[Restart, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True):
    layers: int
    width: int
    vocabulary: int
    parameters: int
    batch: int
    sequence: int
    state_nbytes: int
    tensors: int


class TrainingResult(msgspec.Struct, frozen=True):
    """Everything one run of ``holdfast bench --training`` found out."""

    created: float
    seconds: float
    directory: str
    model: ModelInfo
    rounds: int
    steps: int
    machine: Machine
    rows: tuple[ArmRow, ...]
    sweep: tuple[SweepPoint, ...]
    recovery: tuple[RecoveryRow, ...]
    bars: tuple[Bar, ...]
    problems: tuple[str, ...] = ()
    format: str = "holdfast-bench-training/1"

    def row(self, arm: str) -> ArmRow | None:
        return next((row for row in self.rows if row.arm == arm), None)


def disturbance(row: ArmRow | None, cpu_count: int) -> float | None:
    """Which share of the machine's CPUs others used during the steps of `row`; None when that is unknown."""
    samples = [] if row is None else row.samples
    used = [sample.others_cpu_seconds for sample in samples if sample.others_cpu_seconds is not None]
    if not used:
        return None
    return sum(used) / (cpu_count * sum(sample.seconds for sample in samples))


def predicted_stall(nbytes: int, bytes_per_second: float, compute_seconds: float) -> float:
    """What FastPersist's condition B >= S/(Tf + Tb) leaves of a write that forward and backward cannot hide.

    >>> predicted_stall(1 << 30, 1 << 30, 0.75), predicted_stall(1 << 30, 1 << 30, 1.5)
    (0.25, 0.0)
    """
    return max(0.0, nbytes / bytes_per_second - compute_seconds)


def summarise(rows: Sequence[ArmRow]) -> tuple[ArmRow, ...]:
    """The same rows with their summaries: medians, and ratios of medians to training without checkpoints."""
    plain = next((row for row in rows if row.arm == NONE and row.samples), None)
    if plain is None:
        return tuple(rows)
    return tuple(
        msgspec.structs.replace(row, summary=_summary(row, plain)) if row.samples else row for row in rows
    )


def _summary(row: ArmRow, plain: ArmRow) -> ArmSummary:
    samples = row.samples
    steps = Spread.of([sample.seconds for sample in samples])
    plain_by_round, by_round = _medians_by_round(plain), _medians_by_round(row)
    ratios = [by_round[number] / plain_by_round[number] for number in by_round if number in plain_by_round]
    at_end = [sample.lost_at_end for sample in samples if sample.lost_at_end is not None]
    after_update = [sample.lost_after_update for sample in samples if sample.lost_after_update is not None]
    usual = statistics.median(sample.seconds for sample in plain.samples)
    return ArmSummary(
        step_seconds=steps,
        ratio=steps.median / usual,
        # An arm that failed on its way may have no round in common with the other.
        ratio_by_round=Spread.of(ratios or [steps.median / usual]),
        stall_share=Spread.of([sample.stall_seconds / sample.seconds for sample in samples]),
        compute_seconds=statistics.median(sample.compute_seconds for sample in samples),
        wait_seconds=statistics.median(sample.wait_seconds for sample in samples),
        update_seconds=statistics.median(sample.update_seconds for sample in samples),
        save_seconds=statistics.median(sample.save_seconds for sample in samples),
        cpu_seconds=Spread.of([sample.cpu_seconds for sample in samples]),
        lost_typical=statistics.median(at_end) if at_end else None,
        lost_worst=max([*at_end, *after_update], default=None),
        extra_peak_nbytes=_extra_peak(row, plain),
    )


def _medians_by_round(row: ArmRow) -> dict[int, float]:
    rounds = sorted({sample.round for sample in row.samples})
    return {
        number: statistics.median(sample.seconds for sample in row.samples if sample.round == number)
        for number in rounds
    }


def _extra_peak(row: ArmRow, plain: ArmRow) -> int | None:
    if not row.peak_growth_nbytes or not plain.peak_growth_nbytes:
        return None
    return max(0, max(row.peak_growth_nbytes) - max(plain.peak_growth_nbytes))
