"""How the arms of a training take turns with one model, and what each of their steps costs.

There is one model in memory. In each round every arm trains it for a block of steps, in an order that moves
from round to round (`measure.turns`), so that a machine that grows slower or faster does so for all of them.

Why one extra step opens each block, and is not counted: it meets what the arm before it left behind (caches
full of other things, blocks of the device to be discarded), it pays for what the arm sets up once (buffers,
threads, its plan of the state), and it has no save of its own arm behind it that it would have to share the
machine with. Every counted step has exactly that: one save call, and the background work of the save before.
What is still in flight after the last step of a block is waited for outside the clock; the same amount was
in flight when the first counted step began, so for each arm as many saves are paid for as are counted.
An arm's first block opens with a few more: until then there is no file to write over, only new ones to make.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.study import measure
from holdfast.study.ballast import Ballast
from holdfast.study.training.arms import Arm
from holdfast.study.training.model import Batch, Load, Trainer
from holdfast.study.training.results import NONE, ArmRow, StepSample, summarise

Progress = Callable[[int, str], None]
"""Called before each block with the round and the title of the arm."""

FIRST_LEAD_IN = 3
"""Steps that open an arm's first block: after so many there are retired files to write over."""
_BALLAST_COPIES = 2
"""Enough for an arm that keeps a copy of the state and goes through the page cache."""


@dataclass(slots=True)
class _Log:
    """What is known of one arm so far. An arm that failed once is out: its numbers would mislead."""

    arm: Arm
    absent: str | None = None
    failure: str | None = None
    verified: bool = False
    samples: list[StepSample] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.absent is None and self.failure is None

    def row(self) -> ArmRow:
        if self.absent is not None:
            return ArmRow(self.arm.key, self.arm.title, "not installed", self.absent)
        if self.failure is not None:
            return ArmRow(self.arm.key, self.arm.title, "failed", self.failure)
        return ArmRow(
            self.arm.key,
            self.arm.title,
            "measured",
            samples=tuple(self.samples),
            peak_growth_nbytes=tuple(self.peaks),
        )


class Meter:
    """Runs blocks of steps of one trainer. Steps are numbered through, whoever takes them."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self._trainer = trainer
        self._directory = directory
        self._step = 0

    def block(
        self,
        arm: Arm,
        load: Load,
        steps: int,
        *,
        round_index: int = 1,
        position: int = 0,
        verify: bool = False,
        lead_in: int = 1,
    ) -> tuple[list[StepSample], int | None]:
        """`steps` counted steps of `arm` after `lead_in` others, and how far resident memory grew."""
        own = self._directory / arm.key
        own.mkdir(exist_ok=True)
        batches = [self._trainer.draw(load) for _ in range(lead_in + steps)]
        gc.collect()
        measure.return_free_memory()
        # What others left behind (dirty pages, blocks to discard) is finished before the clock starts.
        os.sync()
        before = measure.reset_peak()
        begun_at = self._step
        samples = []
        try:
            arm.open(own, self._trainer)
            for batch in batches:
                samples.append(self._take_step(arm, batch, begun_at, round_index, position))
            arm.drain()
            after = None if before is None else measure.peak_nbytes()
            wrong = arm.differs(self._trainer) if verify else None
            if wrong is not None:
                raise RuntimeError(f"saved something else than the state after the step: {wrong}")
        finally:
            arm.close()
        growth = None if before is None or after is None else max(0, after - before)
        return samples[lead_in:], growth

    def _take_step(
        self, arm: Arm, batch: Batch, begun_at: int, round_index: int, position: int
    ) -> StepSample:
        trainer = self._trainer
        waited_until = 0.0

        def mark(*_: object) -> None:
            nonlocal waited_until
            waited_until = time.perf_counter()

        others = _others_cpu_seconds()
        cpu = measure.cpu_seconds()
        begin = time.perf_counter()
        trainer.forward_backward(batch)
        computed = time.perf_counter()
        # Hooks run in the order in which they came: this one sees the end of all waiting.
        last_hook = trainer.optimizer.register_step_pre_hook(mark)
        trainer.update()
        last_hook.remove()
        updated = time.perf_counter()
        self._step += 1
        lost_after_update = self._lost(arm, begun_at)
        arm.save(self._step)
        end = time.perf_counter()
        cpu = measure.cpu_seconds() - cpu
        others_after = _others_cpu_seconds()
        return StepSample(
            round=round_index,
            position=position,
            compute_seconds=computed - begin,
            wait_seconds=waited_until - computed,
            update_seconds=updated - waited_until,
            save_seconds=end - updated,
            cpu_seconds=cpu,
            others_cpu_seconds=None
            if others is None or others_after is None
            else max(0.0, others_after - others),
            lost_after_update=lost_after_update,
            lost_at_end=self._lost(arm, begun_at),
        )

    def _lost(self, arm: Arm, begun_at: int) -> int | None:
        if arm.key == NONE:
            return None
        # What an arm saved in earlier blocks is no checkpoint of these steps: the block's own start is.
        return self._step - max(arm.newest() or 0, begun_at)


def run_rounds(
    arms: Sequence[Arm],
    trainer: Trainer,
    load: Load,
    directory: Path,
    *,
    rounds: int,
    steps: int,
    progress: Progress = lambda round_index, title: None,
) -> tuple[ArmRow, ...]:
    """All arms, interleaved; each one's first checkpoint is read back once and compared with the state."""
    logs = [_Log(arm, absent=arm.missing()) for arm in arms]
    meter = Meter(trainer, directory)
    ballast = Ballast(_BALLAST_COPIES * trainer.nbytes)
    try:
        for round_index in range(1, rounds + 1):
            for position, which in enumerate(measure.turns(len(logs), round_index)):
                log = logs[which]
                if not log.running:
                    continue
                progress(round_index, log.arm.title)
                try:
                    with ballast.let_go():
                        samples, growth = meter.block(
                            log.arm,
                            load,
                            steps,
                            round_index=round_index,
                            position=position,
                            verify=not log.verified,
                            lead_in=1 if log.verified else FIRST_LEAD_IN,
                        )
                except Exception as error:
                    # Any arm may fail in its own way: it is shown as failed, and the others go on.
                    log.failure = measure.reason(error)
                    continue
                log.verified = True
                log.samples += samples
                log.peaks += [] if growth is None else [growth]
    finally:
        ballast.close()
    return summarise([log.row() for log in logs])


def _others_cpu_seconds() -> float | None:
    """How long all CPUs of this machine have worked for anyone but this process, or were not ours to have."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of the first two
    ticks = [int(word) for word in path.read_text().splitlines()[0].split()[1:9]]
    busy = sum(ticks) - ticks[3] - ticks[4]
    return busy / os.sysconf("SC_CLK_TCK") - measure.cpu_seconds()
