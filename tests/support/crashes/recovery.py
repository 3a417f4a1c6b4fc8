"""What must hold after a crash: a ledger of promises, and the two recoveries that are held against it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import everystep
from everystep.store import list_steps, step_name
from support.states.identified_states import WIDE, blank_state, identify, load_identity, make_state

BUFFERED = everystep.Options(backend="buffered")


class Lost(AssertionError):
    """Something that was reported durable did not come back."""


# --- what was promised, and when ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """A save was started: from here on its checkpoint may be found."""

    step: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Durable:
    """The save was reported durable: from here on it must be found."""

    step: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Damaged:
    """The test is about to damage this checkpoint: it may still be found, but no promise covers it."""

    step: int


@dataclass(frozen=True, slots=True)
class WentBack:
    """Training goes on from this step. Later ones may be found until one is that was saved after this."""

    step: int


Mark = Begun | Durable | Damaged | WentBack


@dataclass(slots=True)
class Ledger:
    """The versions that may be found for each step, and the step that must be."""

    durable: dict[int, int] = field(default_factory=dict)
    begun: dict[int, set[int]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # steps by the time they were reported
    abandoned: set[tuple[int, int]] = field(default_factory=set)
    since: set[tuple[int, int]] = field(default_factory=set)  # begun after those were abandoned

    def note(self, mark: Mark) -> None:
        match mark:
            case Begun(step, version):
                self.begun.setdefault(step, set()).add(version)
                self.since.add((step, version))
            case Durable(step, version):
                # Also a save that failed before this one is superseded: its bytes may no longer appear.
                self.durable[step] = version
                self.begun[step] = set()
                self.order = [*(other for other in self.order if other != step), step]
                for gone, its in self.abandoned:
                    self.begun[gone].discard(its)
                self.abandoned = set()
            case Damaged(step):
                self.begun[step].add(self.durable.pop(step))
                self.order.remove(step)
            case WentBack(step):
                later = {other: version for other, version in self.durable.items() if other > step}
                for other, version in later.items():
                    self.begun[other].add(self.durable.pop(other))
                    self.abandoned.add((other, version))
                self.since = set()
                self.order = [*(other for other in self.order if other < step), step]

    @property
    def floor(self) -> int:
        """The last step reported durable, 0 for none."""
        return self.order[-1] if self.order else 0

    def may_be(self, step: int) -> set[int]:
        """Versions of `step` that were ever promised or attempted and not superseded."""
        known = self.begun.get(step, set())
        return known | {self.durable[step]} if step in self.durable else known

    def key(self) -> tuple[object, ...]:
        begun = tuple(
            sorted((step, tuple(sorted(versions))) for step, versions in self.begun.items() if versions)
        )
        return self.floor, tuple(sorted(self.durable.items())), begun, len(self.abandoned)

    def check(self, found: tuple[int, int], where: str) -> None:
        step, version = found
        if version not in self.may_be(step):
            raise Lost(f"{where}: version {version} of step {step} came back, only {self.may_be(step)} may")

    def check_beside(self, found: tuple[int, int], visible: Iterable[tuple[int, int]]) -> None:
        if found in self.abandoned and not self.since.isdisjoint(visible):
            raise Lost(f"{found}, which training went back on, came back in favour of {self.since}")


# --- recovering -----------------------------------------------------------------------------------


class Recovery(Protocol):
    def check(self, root: Path, ledger: Ledger, *, thorough: bool) -> None:
        """Recovers what is under `root`; raises `Lost` or `WrongBytes`. `thorough`: also writes on."""

    def visible(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Those of an image's paths that a reader takes for checkpoints."""


@dataclass(frozen=True, slots=True)
class RunRecovery:
    """A run: readers look at every checkpoint, then a new writer opens it, restores, and goes on."""

    name: str = "run"
    wide: int = WIDE

    def visible(self, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            sorted(path for path in paths if path.startswith(f"{self.name}/step-") and "." not in path)
        )

    def check(self, root: Path, ledger: Ledger, *, thorough: bool) -> None:
        run = os.path.join(root, self.name)
        if os.path.isdir(run):
            paths = {step: os.path.join(run, step_name(step)) for step in list_steps(run)}
            found = [self._read_one(path, step, ledger) for step, path in paths.items()]
            visible = [identity for identity in found if identity is not None]
            ledger.check_beside(max(visible, default=(0, 0)), visible)
        elif ledger.floor:
            raise Lost(f"the run is gone; step {ledger.floor} was durable")
        restored = check_restore(run, ledger, self.wide)
        if thorough:
            check_goes_on(run, restored, self.wide)

    @staticmethod
    def _read_one(path: str, step: int, ledger: Ledger) -> tuple[int, int] | None:
        try:
            found = load_identity(path)
        except everystep.CorruptCheckpoint:
            return None  # says so: never wrong bytes. Whether it may be damaged is for the restore to decide.
        if found[0] != step:
            raise Lost(f"{path} holds step {found[0]}")
        ledger.check(found, path)
        return found


@dataclass(frozen=True, slots=True)
class PathRecovery:
    """A checkpoint by itself, saved with `everystep.save`; after its first save it must always be there."""

    name: str = "model"

    def visible(self, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(path for path in paths if path == self.name))

    def check(self, root: Path, ledger: Ledger, *, thorough: bool) -> None:
        path = os.path.join(root, self.name)
        if ledger.order or os.path.exists(path):
            try:
                found = load_identity(path)
            except (everystep.CorruptCheckpoint, everystep.CheckpointNotFound) as error:
                raise Lost(f"{path} is not readable: {error}") from error
            ledger.check(found, path)
        if thorough:
            everystep.save(path, make_state(99), step=99, overwrite=True, options=BUFFERED)
            if load_identity(path) != (99, 0):
                raise Lost("the next save was not what came back")
            if os.path.exists(path + ".partial"):
                raise Lost("the next save left what the crashed one had left")


def check_restore(run: str, ledger: Ledger, wide: int = WIDE) -> int:
    """A new writer opens the run and restores; returns the step. What is damaged is passed over."""
    target = blank_state(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with everystep.Checkpointer(run, target, options=BUFFERED, mode="sync") as checkpointer:
            try:
                restored = checkpointer.restore()
            except everystep.CorruptCheckpoint as error:
                raise Lost(f"nothing could be restored, step {ledger.floor} was durable: {error}") from error
            check_swept(run)
    if restored < ledger.floor:
        raise Lost(f"step {restored} was restored, step {ledger.floor} was durable")
    if restored:
        found = identify(target)
        if found[0] != restored:
            raise Lost(f"restore() said step {restored} and gave step {found[0]}")
        ledger.check(found, run)
    elif identify(target) != (-1, -1):
        raise Lost("restore() found nothing, but touched the state")
    return restored


def check_goes_on(run: str, restored: int, wide: int = WIDE) -> None:
    """After a recovery the run takes saves again, and the next process finds them."""
    step = restored + 1
    target = blank_state(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with everystep.Checkpointer(run, target, options=BUFFERED, mode="sync") as checkpointer:
            checkpointer.restore()
            checkpointer.state = make_state(step, 9, wide)
            checkpointer.save(step)
        with everystep.Checkpointer(run, target, options=BUFFERED, mode="sync") as checkpointer:
            again = checkpointer.restore()
    if again < step or (again == step and identify(target) != (step, 9)):
        raise Lost(f"step {step} was saved after the recovery, and {again} came back")


def leftovers(run: str | Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name.endswith((".partial", ".retired")))


def check_swept(run: str) -> None:
    if leftovers(run):
        raise Lost(f"a new writer did not sweep {leftovers(run)}")
