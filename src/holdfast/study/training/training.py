"""``holdfast bench --training``: what a durable checkpoint after every step costs a real training.

The order of things: look whether there is room, build the model and find the batch that makes a step long
enough, let all arms train in turns, kill and restart trainings, then move the load until the device can no
longer keep up; judge. Each of these has its own module; this one only leads them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.study import measure
from holdfast.study.bench import progress_bar
from holdfast.study.peers import missing_modules, remove
from holdfast.study.picture import check_suffix
from holdfast.study.room import look_for_room, machine_facts
from holdfast.study.states import Gpt2
from holdfast.study.training import bars as training_bars
from holdfast.study.training import measure as training_measure
from holdfast.study.training import model as training_model
from holdfast.study.training import peers as training_peers
from holdfast.study.training import plot as training_plot
from holdfast.study.training import recovery as training_recovery
from holdfast.study.training import sweep as training_sweep
from holdfast.study.training.model import Load, Trainer
from holdfast.study.training.results import ModelInfo, RecoveryRow, SweepPoint, TrainingResult

DEFAULT_NBYTES = 400 << 20
_DISK_COPIES = 16
"""At once on disk: three of each of Holdfast's modes, two of each peer; the sweep's largest is as much."""
_MEMORY_COPIES = 8
"""At once in memory: the state, its gradients and activations, the copy of a peer, the ballast."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What to measure. None where the machine or the size decides; `systems` empty is all of them."""

    directory: Path = field(default_factory=Path.cwd)
    nbytes: int = DEFAULT_NBYTES
    layers: int | None = None
    width: int | None = None
    batch: int | None = None
    sequence: int = training_model.SEQUENCE
    step_seconds: float = 1.5
    rounds: int = 4
    steps: int = 3
    systems: tuple[str, ...] = ()
    sweep: bool = True
    sweep_rounds: int = 2
    short_sweep: bool = False
    restarts: int = 2
    seed: int = 0
    plot: Path | None = None

    @property
    def shape(self) -> Gpt2:
        return training_model.shape_of(self.nbytes, self.layers, self.width)


QUICK = TrainingOptions(
    nbytes=100 << 20, step_seconds=0.4, rounds=2, steps=2, sweep_rounds=1, short_sweep=True, restarts=1
)
"""About a minute, to try things. The promises are not made for a state this small, and not judged."""


def check(options: TrainingOptions) -> None:
    """Raises ValueError for options that make no sense, before anything is built."""
    training_peers.choose(options.systems)
    for name, count, least in (
        ("round", options.rounds, 1),
        ("step per round", options.steps, 1),
        ("restart", options.restarts, 0),
    ):
        if count < least:
            raise ValueError(f"there is at least {least} {name}, not {count}")
    Load(1 if options.batch is None else options.batch, options.sequence)
    _ = options.shape
    if options.plot is not None:
        check_suffix(options.plot)


def run(options: TrainingOptions, console: Console) -> TrainingResult:
    """Measure, and return what was found; progress goes to `console`, the report is left to the caller."""
    check(options)
    absent = missing_modules("torch")
    if absent is not None:
        raise RuntimeError(f"a training needs torch: {absent}")
    nbytes = options.nbytes
    look_for_room(options.directory, "this benchmark", _DISK_COPIES * nbytes, _MEMORY_COPIES * nbytes)

    created, begin = time.time(), time.monotonic()
    load_before = os.getloadavg()[0]
    room = Path(tempfile.mkdtemp(prefix=".holdfast-bench-", dir=options.directory))
    try:
        with _quiet_peers(), training_model.kept_memory():
            result = _measure(options, room, console, created, load_before)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    result = msgspec.structs.replace(result, seconds=time.monotonic() - begin)
    result = msgspec.structs.replace(result, bars=training_bars.judge(result))
    if options.plot is not None:
        training_plot.draw(result, options.plot)
    return result


def _measure(
    options: TrainingOptions, room: Path, console: Console, created: float, load_before: float
) -> TrainingResult:
    arms = training_peers.choose(options.systems)
    starts = (options.restarts + 1) * len(training_recovery.WAYS) - 1 if options.restarts else 0
    total = options.rounds * len(arms) + starts + (8 if options.sweep else 0)
    problems: list[str] = []
    with progress_bar(console) as progress:
        task = progress.add_task("building the model", total=total)
        trainer = Trainer(options.shape, options.seed)
        progress.update(task, description="finding the batch")
        load = _load(options, trainer)
        model = _model_info(trainer, load)

        def on_block(round_index: int, title: str) -> None:
            said = f"round {round_index} of {options.rounds}: {title}"
            progress.update(task, advance=1, description=said)

        rows = training_measure.run_rounds(
            arms,
            trainer,
            load,
            _new(room, "rounds"),
            rounds=options.rounds,
            steps=options.steps,
            progress=on_block,
        )
        remove(room / "rounds")
        recovery: tuple[RecoveryRow, ...] = ()
        if options.restarts:
            recovery = training_recovery.run(
                trainer.shape,
                load,
                _new(room, "recovery"),
                repeats=options.restarts,
                progress=lambda title: progress.update(
                    task, advance=1, description=f"kill and restart: {title}"
                ),
            )
            remove(room / "recovery")
        sweep: tuple[SweepPoint, ...] = ()
        if options.sweep:
            try:
                sweep = training_sweep.run(
                    trainer,
                    training_sweep.places(load, quick=options.short_sweep),
                    _new(room, "sweep"),
                    rounds=options.sweep_rounds,
                    steps=options.steps,
                    progress=lambda place: progress.update(
                        task,
                        advance=1,
                        description=f"sweep: {place.load.tokens} tokens, {place.copies} times the state",
                    ),
                )
            except Exception as error:  # minutes of rounds are not lost to that
                problems.append(f"the sweep failed: {measure.reason(error)}")
    return TrainingResult(
        created=created,
        seconds=0.0,
        directory=str(options.directory),
        model=model,
        rounds=options.rounds,
        steps=options.steps,
        machine=machine_facts(options.directory, load_before),
        rows=rows,
        sweep=sweep,
        recovery=recovery,
        bars=(),
        problems=tuple(problems),
    )


def _load(options: TrainingOptions, trainer: Trainer) -> Load:
    if options.batch is None:
        return training_model.calibrate(trainer, options.step_seconds, options.sequence)
    load = Load(options.batch, options.sequence)
    trainer.seconds_of_step(load)  # the moments of Adam come with the first step
    return load


def _model_info(trainer: Trainer, load: Load) -> ModelInfo:
    shape = trainer.shape
    return ModelInfo(
        layers=shape.layers,
        width=shape.width,
        vocabulary=shape.vocabulary,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        batch=load.batch,
        sequence=load.sequence,
        state_nbytes=trainer.nbytes,
        tensors=len(trainer.tensors),
    )


def _new(room: Path, name: str) -> Path:
    path = room / name
    path.mkdir()
    return path


@contextmanager
def _quiet_peers() -> Iterator[None]:
    """DCP remarks on every save that there is no process group, and that it writes over a checkpoint."""
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"torch\..*")
        yield
