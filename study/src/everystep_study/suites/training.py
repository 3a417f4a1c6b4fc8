"""``everystep bench --training``: what a durable checkpoint after every step costs a real training.

Three parts. *Steps*: all ways to checkpoint train one model in turns. *Restarts*: trainings are killed, and
timed until they go on. *Sweep*: how far a checkpoint can be hidden. FastPersist hides a checkpoint of S bytes
behind forward and backward of the next step when the device writes at B >= S/(Tf + Tb); beyond that the
optimizer waits for the rest. The sweep moves the right side from well inside to well beyond what the device
does: fewer tokens per step, then frozen parameters that only add bytes.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from everystep_study.frameworks import FRAMEWORKS
from everystep_study.harness import cache, results
from everystep_study.harness.costs import cpu_seconds, peak_since, reset_peak, return_free_memory
from everystep_study.harness.files import files_below, missing_everystep, missing_modules
from everystep_study.harness.machine import others_cpu_seconds
from everystep_study.harness.results import (
    BUSY_SHARE,
    CPU_SECONDS,
    MIB,
    OTHERS_SECONDS,
    SECONDS,
    Bar,
    Result,
    Row,
)
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.mechanisms import states
from everystep_study.mechanisms.competitors import TRAINING, choose
from everystep_study.mechanisms.mechanism import Mechanism
from everystep_study.mechanisms.plain import RawDevice
from everystep_study.mechanisms.states import Gpt2, Load
from everystep_study.report.elements import TIMES, Columns, Shown, View, milliseconds
from everystep_study.workers.orders import Context
from everystep_study.workers.processes import FrameworkProcess

if TYPE_CHECKING:
    from everystep_study.frameworks.torch_training import Trainer

STEP_TO_NONE, STEP_GOAL, STALL_PERCENT = 1.05, 1.03, 3.0
STATE_NBYTES = (300_000_000, 600_000_000)
STEP_SECONDS = (0.8, 2.5)
"""What the promises were made for."""

FIRST_LEAD_IN = 3
SHORTEST_SEQUENCE = 8

_DISK_COPIES = 16
"""At once on disk: three of each of Everystep's modes, two of each peer; the sweep's largest is as much."""
_MEMORY_COPIES = 8
"""At once in memory: the state, its gradients and activations, the copy of a peer, reserved memory."""


class Steps(Case):
    """Blocks of steps of one shared trainer, with a checkpoint after each.

    One extra step opens each block and is not counted: it meets what the system before it left behind, pays
    for what is set up once, and has no save behind it that it would share the machine with. The first block
    opens with three: until then there is no file to write over. What is still in flight after the last step
    is waited for outside the clock; the same amount was in flight when the first counted step began.
    """

    def __init__(
        self, key: str, kind: type[Mechanism], trainer: Trainer, load: Load, steps: int, section: str
    ) -> None:
        self.key, self.title, self.sections = key, kind.title, (section,)
        self._kind, self._trainer, self._load, self._steps = kind, trainer, load, steps
        self._directory = Path()
        self._lead_in = FIRST_LEAD_IN
        self._opened: Mechanism | None = None

    def missing(self) -> str | None:
        return self._kind.missing()

    def setup(self, directory: Path) -> None:
        self._kind.prepare()
        self._directory = directory / "kept"
        self._directory.mkdir()

    def measure(self, turn: Turn) -> None:
        batches = [self._trainer.draw(self._load) for _ in range(self._lead_in + self._steps)]
        return_free_memory()
        with turn.settled():
            before = reset_peak()
            begun_at = self._trainer.steps
            # Each round goes on with the trainer as it is, not as the last round saved it.
            self._opened = opened = self._kind(self._trainer, self._directory, durable=True, start_over=True)
            found = [self._step(opened, batch, begun_at) for batch in batches]
            opened.wait()
            found[-1] |= peak_since(before)
        for readings in found[self._lead_in :]:
            turn.record(self.sections[0], readings)
        self._lead_in = 1

    def check(self) -> None:
        if (
            self.key != "none"
            and self._opened is not None
            and (wrong := differs(self._opened, self._trainer))
        ):
            raise RuntimeError(f"saved something else than the state after the step: {wrong}")

    def clean_up(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _step(self, opened: Mechanism, batch: Any, begun_at: int) -> dict[str, float]:
        trainer, waited_until = self._trainer, 0.0

        def mark(*_: object) -> None:
            nonlocal waited_until
            waited_until = time.perf_counter()

        others, cpu = others_cpu_seconds(), cpu_seconds()
        begin = time.perf_counter()
        trainer.forward_backward(batch)
        computed = time.perf_counter()
        # Hooks run in the order in which they came: this one sees the end of all waiting.
        last_hook = trainer.optimizer.register_step_pre_hook(mark)
        trainer.update()
        last_hook.remove()
        updated = time.perf_counter()
        lost_after_update = self._lost(opened, begun_at)
        opened.save_and_sync()
        end = time.perf_counter()
        stall = waited_until - computed + end - updated
        readings = {
            SECONDS: end - begin,
            "compute_seconds": computed - begin,
            "wait_seconds": waited_until - computed,
            "update_seconds": updated - waited_until,
            "save_seconds": end - updated,
            "stall_seconds": stall,
            "stall_share": stall / (end - begin),
            CPU_SECONDS: cpu_seconds() - cpu,
            "state_nbytes": float(trainer.nbytes),
        }
        if self.key != "none":
            readings |= {"lost_after_update": lost_after_update, "lost_at_end": self._lost(opened, begun_at)}
        after = others_cpu_seconds()
        if others is not None and after is not None:
            readings[OTHERS_SECONDS] = max(0.0, after - others)
        return readings

    def _lost(self, opened: Mechanism, begun_at: int) -> float:
        """Completed steps that a crash would undo now. Checkpoints of earlier blocks do not count."""
        return float(self._trainer.steps - begun_at - opened.durable_saves)


def differs(opened: Mechanism, trainer: Trainer) -> str | None:
    """How the newest checkpoint differs from the state as it is now, or None."""
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    for tensor in trainer.tensors.values():
        tensor.zero_()  # a load that does nothing must not pass
    try:
        opened.load()
        return states.difference(before, trainer.tensors)
    finally:
        for name, tensor in trainer.tensors.items():
            tensor.copy_(before[name])


class RawWrite(Case):
    """As many bytes as the trainer's state has, straight to the device."""

    key, title, sections = "raw", "raw device", ("sweep",)

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def measure(self, turn: Turn) -> None:
        raw = RawDevice(self._trainer, turn.directory, durable=True)
        with turn.settled():
            raw.save()
        turn.record("sweep", {SECONDS: raw.own_seconds or 0.0})


CHILD_STEPS = 2
"""Per life: enough that a kill after the last of them finds a checkpoint of the one before."""
CHILD_SECONDS = 180.0


class Restart(Case):
    """A training that is killed without warning, started again, and timed until its next step has ended.

    What a killed process wrote through the page cache is still there when it starts again on the same
    machine, but not on another one or after a power cut. Everystep reads past the cache, so `torch.load` is
    shown both ways: with its file in memory, and with its file forgotten.
    """

    sections = ("restart",)

    def __init__(self, key: str, title: str, shape: Gpt2, load: Load) -> None:
        self.key, self.title = key, title
        self._system = "overlap" if key == "everystep" else "torch"
        self._cold = key != "torch-cached"
        self._order: dict[str, Any] = {"shape": asdict(shape), "load": asdict(load), "system": self._system}
        self._last_step = 0

    def missing(self) -> str | None:
        return missing_modules("torch") or (missing_everystep() if self.key == "everystep" else None)

    def setup(self, directory: Path) -> None:
        self._directory = directory / "kept"
        self._directory.mkdir()

    def measure(self, turn: Turn) -> None:
        os.sync()
        for file in files_below(self._directory) if self._cold else ():
            cache.forget(file)
        process = FrameworkProcess("training", FRAMEWORKS["torch"], self._directory.parent, CHILD_SECONDS)
        started = time.monotonic()
        try:
            begun = process.ask(resume, None, directory=str(self._directory), **self._order)
            ended = [process.ask(step_and_save)["ended"] for _ in range(CHILD_STEPS)]
        finally:
            process.kill()
        if self._last_step:
            if begun["completed"] == 0:
                raise RuntimeError(f"found no checkpoint after {self._last_step} steps")
            readings = {
                "import_seconds": begun["imported"] - started,
                "build_seconds": begun["built"] - begun["imported"],
                "restore_seconds": begun["restored"] - begun["built"],
                "step_seconds": ended[0] - begun["restored"],
            }
            lost = self._last_step - begun["completed"]
            turn.record("restart", readings | {SECONDS: sum(readings.values()), "lost": float(lost)})
        self._last_step = begun["completed"] + CHILD_STEPS


def resume(
    context: Context, directory: str, system: str, shape: dict[str, int], load: dict[str, int]
) -> dict[str, Any]:
    """In the process of the training: builds the model and goes on from the newest checkpoint.

    Answers the steps completed, and when each part of the start ended, by the clock that all processes share.
    """
    from everystep_study.frameworks.torch_training import Trainer

    kind = TRAINING[system]
    kind.missing()  # imports Everystep, if it is that
    imported = time.monotonic()
    trainer = Trainer(Gpt2(**shape))
    built = time.monotonic()
    opened = kind(trainer, Path(directory), durable=True)
    trainer.steps = opened.resume()
    context.kept = {"trainer": trainer, "opened": opened, "load": Load(**load)}
    restored = time.monotonic()
    return {"completed": trainer.steps, "imported": imported, "built": built, "restored": restored}


def step_and_save(context: Context) -> dict[str, Any]:
    trainer = context.kept["trainer"]
    trainer.forward_backward(trainer.draw(context.kept["load"]))
    trainer.update()
    ended = time.monotonic()
    context.kept["opened"].save_and_sync()
    return {"ended": ended}


def places(base: Load, *, short: bool = False) -> list[tuple[Load, int]]:
    """The sweep: how much is computed per step, and how many times the model's own state is saved."""
    shortest = Load(1, min(SHORTEST_SEQUENCE, base.sequence))
    if short:
        return [(base, 1), (shortest, 1), (shortest, 3)]
    loads = [Load(max(1, base.batch // 2), base.sequence), Load(1, base.sequence)]
    loads += [Load(1, max(shortest.sequence, base.sequence // 4)), shortest]
    return [*((load, 1) for load in dict.fromkeys(loads)), (shortest, 2), (shortest, 4)]


def predicted_stall(write_seconds: float, compute_seconds: float) -> float:
    """What forward and backward cannot hide of a write.

    >>> predicted_stall(1.0, 0.75), predicted_stall(1.0, 1.5)
    (0.25, 0.0)
    """
    return max(0.0, write_seconds - compute_seconds)


@dataclass
class TrainingSuite(Suite):
    """None where the machine or the size decides; `systems` empty is all of them."""

    name = "training"
    ours = ("overlap", "snapshot", "sync", "everystep")
    nbytes: int = 400 << 20
    layers: int | None = None
    width: int | None = None
    batch: int | None = None
    sequence: int = 128
    step_seconds: float = 1.5
    rounds: int = 4
    steps: int = 3
    systems: tuple[str, ...] = ()
    sweep: bool = True
    sweep_rounds: int = 2
    short_sweep: bool = False
    restarts: int = 2

    @classmethod
    def quick(cls) -> TrainingSuite:
        """About a minute. The promises are not made for a state this small, and not judged."""
        return cls(
            nbytes=100 << 20,
            step_seconds=0.4,
            rounds=2,
            steps=2,
            sweep_rounds=1,
            short_sweep=True,
            restarts=1,
        )

    def needs(self) -> Needs:
        choose(self.systems, TRAINING)
        for name, count, least in (("step per round", self.steps, 1), ("restart", self.restarts, 0)):
            if count < least:
                raise ValueError(f"there is at least {least} {name}, not {count}")
        Load(1 if self.batch is None else self.batch, self.sequence)
        self._shape = states.shape_of(self.nbytes, self.layers, self.width)
        absent = missing_modules("torch")
        if absent is not None:
            raise RuntimeError(f"a training needs torch: {absent}")
        return Needs(_DISK_COPIES * self.nbytes, _MEMORY_COPIES * self.nbytes, 2 * self.nbytes)

    def groups(self, folder: Path) -> Iterator[Group]:
        from everystep_study.frameworks import torch_training as model

        with model.kept_memory():
            self._trainer = trainer = model.Trainer(self._shape)
            if self.batch is None:
                self._load = load = model.calibrate(trainer, self.step_seconds, self.sequence)
            else:
                self._load = load = Load(self.batch, self.sequence)
                trainer.seconds_of_step(load)  # the moments of Adam come with the first step
            own_nbytes = self._nbytes = trainer.nbytes
            chosen = choose(self.systems, TRAINING, always=("none",))
            cases = [Steps(key, kind, trainer, load, self.steps, "step") for key, kind in chosen.items()]
            yield Group("steps", cases, self.rounds, warm_up=0)
            if self.restarts:
                ways = {
                    "everystep": "Everystep",
                    "torch-cold": "torch.load, cold",
                    "torch-cached": "torch.load, cached",
                }
                restarts = [Restart(key, title, self._shape, load) for key, title in ways.items()]
                yield Group("restarts", restarts, self.restarts)
            size = 1
            for place, copies in places(load, short=self.short_sweep) if self.sweep else ():
                if copies > size:
                    trainer.grow((copies - size) * own_nbytes)
                    size = copies
                name = f"{place.batch} {TIMES} {place.sequence} tokens, {trainer.nbytes / 1e6:,.0f} MB"
                swept = [
                    Steps(key, TRAINING[key], trainer, place, self.steps, "sweep")
                    for key in ("none", "overlap", "sync")
                ]
                yield Group(name, [*swept, RawWrite(trainer)], self.sweep_rounds, warm_up=0)

    def subject(self) -> str:
        shape = self._shape
        return (
            f"GPT-2 of {shape.layers} layers, width {shape.width}, {self._nbytes / 1e6:.0f} MB of state, "
            f"{self._load.batch} {TIMES} {self._load.sequence} tokens per step, {self.steps} steps per round"
        )

    def facts(self) -> dict[str, float]:
        return {
            "state_nbytes": self._nbytes,
            "layers": self._shape.layers,
            "width": self._shape.width,
            "vocabulary": self._shape.vocabulary,
            "batch": self._load.batch,
            "sequence": self._load.sequence,
            "steps": self.steps,
        }

    def views(self, result: Result) -> list[View]:
        def beside(row: Row, case: str, name: str) -> float:
            other = result.beside(row, case)
            return (other and other.median(name)) or math.nan

        def extra_mib(row: Row) -> Shown:
            plain = result.beside(row, "none")
            peak, base = row.peak(), None if plain is None else plain.peak()
            return None if peak is None or base is None else f"{max(0.0, peak - base) / MIB:,.0f}"

        def ms(name: str) -> Callable[[Row], Shown]:
            return lambda row: milliseconds(row.median(name))

        def compute(row: Row) -> float:
            # From the training without checkpoints: that of the other is longer by what it shares.
            return beside(row, "none", "compute_seconds")

        def write(row: Row) -> float:
            return beside(row, "sync", "save_seconds")

        def predicted(row: Row) -> float:
            return predicted_stall(write(row), compute(row))

        slower: Columns = {
            f"{TIMES}none": lambda row: f"{results.ratio(row, result.beside(row, 'none')) or math.nan:.3f}"
        }
        steps: Columns = {
            "stall": lambda row: f"{row.median('stall_share', 100):.1f} %",
            "CPU s": lambda row: row.median(CPU_SECONDS),
            "crash loses": _lost,
            "MiB": extra_mib,
        }
        phases: Columns = {
            "fwd+bwd": ms("compute_seconds"),
            "waiting": ms("wait_seconds"),
            "update": ms("update_seconds"),
            "save call": ms("save_seconds"),
        }
        sweep: Columns = {
            "Tf+Tb": lambda row: milliseconds(compute(row)),
            "ratio": lambda row: write(row) / compute(row),
            "predicted": lambda row: milliseconds(predicted(row)),
            "raw B": lambda row: milliseconds(predicted_stall(beside(row, "raw", SECONDS), compute(row))),
        }
        restart: Columns = {
            "imports": lambda row: row.median("import_seconds"),
            "model": lambda row: row.median("build_seconds"),
            "restore": lambda row: row.median("restore_seconds"),
            "step": lambda row: row.median("step_seconds"),
            "lost": lambda row: f"{row.peak('lost'):.0f}",
        }
        return [
            View(
                "step",
                "a training step, each with a durable checkpoint",
                columns=slower | steps,
                ours=self.ours,
                reference="none",
            ),
            View(
                "step",
                "where a step goes",
                "ms",
                show=milliseconds,
                columns=phases,
                ours=self.ours,
                reference="none",
            ),
            View(
                "sweep",
                "stall in overlap as a checkpoint outgrows forward and backward",
                "ms",
                partial(Row.spread, name="stall_seconds"),
                show=milliseconds,
                columns=sweep | slower,
                cases=("overlap",),
                ours=self.ours,
                named_by=lambda row: row.group,
                mark=predicted,
            ),
            View(
                "restart",
                "killed: from the start of a new process to the end of its next step",
                columns=restart,
            ),
        ]

    def notes(self, result: Result) -> list[str]:
        notes = [
            "'stall' is the share of a step in which the training thread waits, in the save call and before "
            "the update; 'CPU s' is that of all threads per step; 'crash loses' counts completed steps that "
            "are not durable yet, when a save call has returned and at the worst moment seen; 'MiB' is the "
            "peak of resident memory beyond that of training alone."
        ]
        if result.section("sweep"):
            notes.append(
                "'ratio' is the time to write a checkpoint (Everystep, sync) to that of the step; "
                "predicted is max(0, S/B - (Tf+Tb)), B of Everystep's own save alone, or of a raw write. "
                "The stall can be less: what follows the last byte (sync, commit) is not waited for."
            )
        return notes

    def bars(self, result: Result) -> list[Bar]:
        row, plain = result.row("step", "overlap"), result.row("step", "none")
        why = results.why_not(plain, row) or self._out_of_range(result)
        promise = "step with a durable checkpoint each, against none"
        step = results.promised("overlap-step", promise, "<=", STEP_TO_NONE, row, plain, why=why)
        stall = None
        if step.measured is not None and row is not None:
            stall = results.scaled(results.interval(row, "stall_share"), 100)
            why = f"worst step {100 * max(row.values('stall_share')):.1f} %"
            if not step.detail:
                reached = "reached" if step.measured.value <= STEP_GOAL else "not reached"
                step = msgspec.structs.replace(step, detail=f"goal {STEP_GOAL:.2f}: {reached}")
        waits = "share of a step in which training waits"
        return [step, results.judge("overlap-stall", waits, "<=", STALL_PERCENT, "%", stall, why)]

    def _out_of_range(self, result: Result) -> str:
        """Why the promises do not apply to this run; empty when they do."""
        low, high = STATE_NBYTES
        if not low <= result.facts["state_nbytes"] <= high:
            found = f"{result.facts['state_nbytes'] / 1e6:.0f} MB"
            return f"made for {low / 1e6:.0f} to {high / 1e6:.0f} MB of state, not {found}"
        plain = result.row("step", "none")
        seconds = (None if plain is None else plain.median()) or 0.0
        shortest, longest = STEP_SECONDS
        if not shortest <= seconds <= longest:
            return f"made for steps of {shortest} to {longest} s, not {seconds:.2f}"
        share = result.machine.others_share or 0.0
        if share > BUSY_SHARE:
            return f"others used {100 * share:.0f} % of the CPUs meanwhile; measure again when it is quiet"
        return ""


def _lost(row: Row) -> str:
    at_end, after_update = row.values("lost_at_end"), row.values("lost_after_update")
    if not at_end:
        return "everything"
    return f"{statistics.median(at_end):g}, worst {max([*at_end, *after_update]):g}"
