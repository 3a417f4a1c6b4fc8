"""Recovery: a training is killed without warning, started again, and timed until its next step has ended.

Each system has a training of its own that checkpoints every step. In turns, each is started, does a few
steps, and is killed with SIGKILL right after the last of them; whoever is started next time finds what that
kill left. Only starts that find a checkpoint count.

What a killed process wrote through the page cache is still there when it starts again on the same machine;
on another machine, or after a power cut, it is not. Holdfast reads past the cache and does not care, so
`torch.load` is shown both ways: with its file in memory, and with its file forgotten.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.study import cache, measure
from holdfast.study.peers import files_below, missing_holdfast, missing_modules
from holdfast.study.states import Gpt2
from holdfast.study.training.child import Message, Ready, Stepped
from holdfast.study.training.model import Load
from holdfast.study.training.results import (
    HOLDFAST_COLD,
    TORCH_COLD,
    TORCH_WARM,
    RecoveryRow,
    Restart,
)

CHILD_SECONDS = 180.0
"""A child that takes longer is killed, and its row is reported as failed."""
STEPS = 2
"""Per life: enough that a kill after the last of them finds a checkpoint of the one before durable."""


@dataclass(frozen=True, slots=True)
class Way:
    """One row: which training is restarted, and whether its files are in the page cache then."""

    system: str
    title: str
    program: str
    cold: bool


WAYS = (
    Way(HOLDFAST_COLD, "Holdfast", "holdfast", cold=True),
    Way(TORCH_COLD, "torch.load, cold", "torch", cold=True),
    Way(TORCH_WARM, "torch.load, cached", "torch", cold=False),
)


class RecoveryFailed(Exception):
    """A training process did not do what was wanted; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Life:
    """One process from start to kill."""

    started: float
    ready: Ready
    steps: tuple[Stepped, ...]


@dataclass(slots=True)
class _Log:
    way: Way
    absent: str | None
    failure: str | None = None
    samples: list[Restart] = field(default_factory=list)

    def row(self) -> RecoveryRow:
        if self.absent is not None:
            return RecoveryRow(self.way.system, self.way.title, "not installed", self.absent)
        if self.failure is not None:
            return RecoveryRow(self.way.system, self.way.title, "failed", self.failure)
        return RecoveryRow(self.way.system, self.way.title, "measured", samples=tuple(self.samples))


def run(
    shape: Gpt2,
    load: Load,
    directory: Path,
    *,
    repeats: int,
    mode: str = "overlap",
    progress: Callable[[str], None] = lambda title: None,
) -> tuple[RecoveryRow, ...]:
    """`repeats` restarts of each way, in turns; one start more of each training makes a first checkpoint."""
    logs = [_Log(way, _missing(way)) for way in WAYS]
    last_step: dict[str, int] = {}
    for round_index in range(repeats + 1):
        for which in measure.turns(len(logs), round_index):
            log = logs[which]
            way = log.way
            if log.absent is not None or log.failure is not None:
                continue
            own = directory / way.program
            own.mkdir(exist_ok=True)
            if round_index == 0 and way.program in last_step:
                continue  # two rows restart the same training
            progress(way.title)
            os.sync()
            if way.cold:
                for file in files_below(own):
                    cache.forget(file)
            try:
                life = live(own, way.program, shape, load, mode)
                if round_index > 0:
                    log.samples.append(restart_of(life, last_step[way.program]))
            except (RecoveryFailed, OSError) as error:
                log.failure = measure.reason(error)
                continue
            last_step[way.program] = life.steps[-1].step
    return tuple(log.row() for log in logs)


def restart_of(life: Life, last_step: int) -> Restart:
    """The parts of a start, and how many of the `last_step` steps before it were lost."""
    ready = life.ready
    if ready.completed == 0:
        raise RecoveryFailed(f"found no checkpoint after {last_step} steps")
    return Restart(
        import_seconds=ready.imported - life.started,
        build_seconds=ready.built - ready.imported,
        restore_seconds=ready.restored - ready.built,
        step_seconds=life.steps[0].ended - ready.restored,
        lost=max(0, last_step - ready.completed),  # killed between a save and the word of it: none
    )


def live(directory: Path, program: str, shape: Gpt2, load: Load, mode: str) -> Life:
    """Start a training, let it take `STEPS` steps, and kill it."""
    command = [sys.executable, "-m", "holdfast.study.training.child", str(directory)]
    for name, value in {
        "system": program,
        "mode": mode,
        "layers": shape.layers,
        "width": shape.width,
        "vocabulary": shape.vocabulary,
        "batch": load.batch,
        "sequence": load.sequence,
    }.items():
        command += [f"--{name}", str(value)]
    ready: Ready | None = None
    steps: list[Stepped] = []
    decoder = msgspec.json.Decoder(Message)
    started = time.monotonic()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        overdue = threading.Timer(CHILD_SECONDS, child.kill)
        overdue.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                # What it does until the kill reaches it counts as well; the last line may be half of one.
                if not line.endswith(b"\n"):
                    break
                match decoder.decode(line):
                    case Ready() as ready:
                        pass
                    case Stepped() as stepped:
                        steps.append(stepped)
                if len(steps) == STEPS:
                    child.send_signal(signal.SIGKILL)
        finally:
            overdue.cancel()
            child.send_signal(signal.SIGKILL)
            child.wait()
        errors.seek(0)
        complaint = errors.read().decode(errors="replace").strip()
    if ready is None or len(steps) < STEPS:
        last = complaint.splitlines()[-1] if complaint else "it said nothing"
        raise RecoveryFailed(f"the training ended by itself, or took over {CHILD_SECONDS:.0f} s: {last}")
    return Life(started, ready, tuple(steps))


def _missing(way: Way) -> str | None:
    return missing_modules("torch") or (missing_holdfast() if way.program == "holdfast" else None)
