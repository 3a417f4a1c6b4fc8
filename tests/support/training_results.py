"""A made-up result of a training benchmark, with round numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.study.results import Machine, Spread
from holdfast.study.training import bars as training_bars
from holdfast.study.training.results import (
    CHECKFREQ,
    DCP_ASYNC,
    NONE,
    OVERLAP,
    SNAPSHOT,
    SYNC,
    TORCH,
    ArmRow,
    ModelInfo,
    RecoveryRow,
    Restart,
    StepSample,
    SweepPoint,
    TrainingResult,
    predicted_stall,
    summarise,
)

MIB = 1 << 20
TITLES = {
    NONE: "no checkpoints",
    OVERLAP: "Holdfast, overlap",
    SNAPSHOT: "Holdfast, snapshot",
    SYNC: "Holdfast, sync",
    CHECKFREQ: "CheckFreq style",
    DCP_ASYNC: "dcp.async_save",
    TORCH: "torch.save",
}
STALLS = {NONE: 0.0, OVERLAP: 0.01, SNAPSHOT: 0.1, SYNC: 0.3, CHECKFREQ: 0.5, DCP_ASYNC: 0.6, TORCH: 0.9}


def sample(
    round_index: int = 1, *, compute: float = 1.0, stall: float = 0.0, others: float = 0.0
) -> StepSample:
    return StepSample(
        round=round_index,
        position=0,
        compute_seconds=compute,
        wait_seconds=stall / 4,
        update_seconds=0.2,
        save_seconds=stall * 3 / 4,
        cpu_seconds=2.0,
        others_cpu_seconds=others,
        lost_after_update=1,
        lost_at_end=0,
    )


def row(
    arm: str, *, compute: float = 1.0, stall: float | None = None, peak_mib: int = 100, others: float = 0.0
) -> ArmRow:
    stall = STALLS[arm] if stall is None else stall
    samples = tuple(sample(number, compute=compute, stall=stall, others=others) for number in (1, 1, 2))
    return ArmRow(arm, TITLES[arm], "measured", samples=samples, peak_growth_nbytes=(peak_mib * MIB,))


def rows(**changed: ArmRow) -> list[ArmRow]:
    return [changed.get(arm, row(arm)) for arm in TITLES]


def point(compute: float, nbytes: int = 400_000_000) -> SweepPoint:
    own, raw = nbytes / 1.6e9, nbytes / 2e9
    stall = predicted_stall(nbytes, 1.6e9, compute) + 0.01
    return SweepPoint(
        batch=1,
        sequence=128,
        state_nbytes=nbytes,
        raw_seconds=raw,
        own_seconds=own,
        compute_seconds=compute,
        plain_step_seconds=Spread(compute + 0.2, compute + 0.1, compute + 0.3),
        step_seconds=Spread(compute + 0.2 + stall, compute + 0.1 + stall, compute + 0.3 + stall),
        stall_seconds=Spread(stall, stall * 0.8, stall * 1.3),
        predicted_raw_seconds=predicted_stall(nbytes, 2e9, compute),
        predicted_own_seconds=predicted_stall(nbytes, 1.6e9, compute),
    )


def recovery() -> tuple[RecoveryRow, ...]:
    return tuple(
        RecoveryRow(system, title, "measured", samples=(Restart(2.5, 0.5, restore, 1.2, 1),))
        for system, title, restore in (
            ("holdfast", "Holdfast", 0.25),
            ("torch-cold", "torch.load, cold", 0.6),
            ("torch-warm", "torch.load, cached", 0.4),
        )
    )


def result(given: Sequence[ArmRow] | None = None, *, nbytes: int = 400_000_000) -> TrainingResult:
    made = TrainingResult(
        created=0.0,
        seconds=300.0,
        directory="/somewhere",
        model=ModelInfo(6, 384, 50_000, 33_000_000, 4, 128, nbytes, 300),
        rounds=2,
        steps=3,
        machine=Machine("Linux", 2, 0.1, "ext4", {"python": "3.11"}),
        rows=summarise(rows() if given is None else given),
        sweep=(*map(point, (1.2, 0.6, 0.3, 0.15)), point(0.15, 1_200_000_000)),
        recovery=recovery(),
        bars=(),
    )
    return msgspec.structs.replace(made, bars=training_bars.judge(made))
