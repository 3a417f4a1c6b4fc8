"""What a Checkpointer does while `everystep drill` runs its script: it works elsewhere, and keeps a diary.

The drill sets ``EVERYSTEP_DRILL`` to a directory. A Checkpointer made in such a process puts its run there
instead of where the script says, so that a drill never touches a real run, and appends one line to the
diary for everything a judge must know: what the training had completed, what was durable, which bits it had.
The drill is an observer of the run (`run_observer`); everything else is as without a drill. With
``EVERYSTEP_DRILL_KILL`` the process also dies at a chosen call of the engine, in the middle of a save or of a
restore, where no other process could aim.

Without the variable `join` gives None and nothing of this happens. The drill itself, which reads the diary,
is `everystep.drill`.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Literal

import msgspec

from everystep.checkpointer import events, run_observer
from everystep.checkpointer.run_observer import Moment
from everystep.engine import faults
from everystep.format.checksums import digest
from everystep.state import Node
from everystep.state.flatten import value_node
from everystep.store import step_name
from everystep.store.options import WriteSettings
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint

What = Literal["opened", "restoring", "restored", "completed", "saving", "durable", "failed"]
KillIn = Literal["restoring", "saving"]

DIRECTORY = "EVERYSTEP_DRILL"
KILL = "EVERYSTEP_DRILL_KILL"
DIARY = "diary.jsonl"
RUNS = "runs"
_PHASES: dict[str, KillIn] = {"restoring": "restoring", "saving": "saving"}
_SETS = frozenset({"$set", "$frozenset"})


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the diary. `at` is the system's monotonic clock, which all processes share.

    Lines about a checkpoint have its `digest`; behind it in the same line stands `Contents`. `calls`: of the
    engine in a restore that was to be killed and was not. `mode`: how a save that begins is made.
    """

    what: What
    run: str
    at: float
    pid: int
    step: int | None = None
    digest: str | None = None
    calls: int | None = None
    mode: str | None = None


class Contents(msgspec.Struct, frozen=True):
    """A digest for each leaf and each value of a checkpoint, in the manifest's order."""

    leaves: dict[str, str]
    values: dict[str, str]


class Observed(Mark, frozen=True, omit_defaults=True, kw_only=True):
    """A line about a checkpoint, with its contents."""

    contents: Contents


class Kill(msgspec.Struct, frozen=True):
    """Die at the nth call of the engine: after `restore` began, or in the first save of `step` or later."""

    phase: KillIn
    nth: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.phase}:{self.nth}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> Kill:
        try:
            phase, nth, step = text.split(":")
            return cls(_PHASES[phase], int(nth), int(step))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{KILL}={text!r} (want restoring:NTH:0 or saving:NTH:STEP): {error}") from error


def join(run: str) -> Drill | None:
    """The drill under way in this process, for the run that a script named; None when there is none."""
    directory = os.environ.get(DIRECTORY)
    return Drill(directory, run, os.environ.get(KILL)) if directory else None


def relocate(directory: str, run: str) -> str:
    """Where a drill in `directory` has the run that a script calls `run`: the same place every time."""
    run = os.path.abspath(run)
    name = os.path.basename(run) or "run"
    return os.path.join(os.path.abspath(directory), RUNS, f"{name}-{digest(os.fsencode(run))[:8]}")


def without_volumes(settings: WriteSettings) -> WriteSettings:
    """How a Checkpointer writes: under a drill to no volumes, because a drill must not touch them.

    Shares of volumes follow from measured speeds, too, so that equal states are not cut alike every time.
    """
    return replace(settings, volumes=()) if os.environ.get(DIRECTORY) else settings


class Drill:
    """A run under a drill: an observer of it that writes the diary. `path` is where the run really is.

    `completed` comes at every call of save, also of a step that `every` skips; then `saving` when a save
    begins, and `durable` or `failed` when it has ended, before retention can remove the checkpoint.
    """

    def __init__(self, directory: str, run: str, kill: str | None) -> None:
        self.path = relocate(directory, run)
        self._name = os.path.basename(self.path)
        self._kill = Kill.parse(kill) if kill else None
        os.makedirs(directory, exist_ok=True)
        self._diary = os.open(
            os.path.join(directory, DIARY), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def observe(self, moment: Moment) -> None:
        """Writes the line for a moment of the run, if it needs one."""
        match moment:
            case run_observer.Opening():
                self._mark("opened")
                # From here on: opening a run sweeps what the last process left, which is part of resuming.
                self._arm("restoring")
            case run_observer.Restoring():
                self._mark("restoring")
            case run_observer.NothingToRestore():
                self._mark("restored", 0, calls=self._disarm("restoring"))
            case events.Restored(step=step):
                self._write_contents(
                    "restored",
                    step,
                    os.path.join(self.path, step_name(step)),
                    calls=self._disarm("restoring"),
                )
            case run_observer.Completed(step=step):
                self._mark("completed", step)
            case run_observer.Saving(step=step, mode=mode):
                # The mode decides how much may be lost while the save lasts.
                self._mark("saving", step, mode=mode)
                if self._kill is not None and step >= self._kill.step:
                    self._arm("saving")
            case run_observer.Durable(step=step, path=path):
                self._write_contents("durable", step, path)
            case events.Failed(step=step):
                self._mark("failed", step)

    def _arm(self, phase: KillIn) -> None:
        if self._kill is None or self._kill.phase != phase:
            return
        faults.install(faults.Fault("any", self._kill.nth, "kill"))
        if phase == "saving":
            self._kill = None  # armed once; should this save have fewer calls, the next one has the others

    def _disarm(self, phase: KillIn) -> int | None:
        """The restore is over. How many calls it took helps to aim better the next time."""
        if self._kill is None or self._kill.phase != phase:
            return None
        calls = faults.count_calls()
        faults.install()
        self._kill = None
        return calls

    def _mark(
        self, what: What, step: int | None = None, *, calls: int | None = None, mode: str | None = None
    ) -> None:
        self._write(Mark(what, self._name, time.monotonic(), os.getpid(), step, calls=calls, mode=mode))

    def _write_contents(self, what: What, step: int, checkpoint: str, *, calls: int | None = None) -> None:
        at = time.monotonic()  # reading the manifest is the drill's time, not the save's
        with open_checkpoint(checkpoint) as opened:
            contents = contents_of(opened)
        whole = digest(msgspec.json.encode(contents, order="deterministic"))
        self._write(
            Observed(what, self._name, at, os.getpid(), step, digest=whole, calls=calls, contents=contents)
        )

    def _write(self, mark: Mark) -> None:
        # One call: lines of several threads do not mix, and a kill leaves at most the last line unfinished.
        os.write(self._diary, msgspec.json.encode(mark) + b"\n")


def contents_of(checkpoint: Checkpoint) -> Contents:
    """What a checkpoint holds, from its manifest alone: the checksums there cover every byte.

    Two checkpoints have equal contents when they hold the same state, wherever its bytes lie in the files.
    """
    forms: dict[str, str] = {}
    pieces: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for part in checkpoint._parts:
        for leaf in part.leaves:
            forms[leaf.name] = f"{leaf.dtype}{leaf.shape}"
            held = pieces.setdefault(leaf.name, [])
            held.extend((piece.start, piece.chunks) for piece in leaf.fragments)
    leaves = {name: digest(f"{form}{sorted(pieces[name])}".encode()) for name, form in forms.items()}
    leaves.update({alias.name: f"tied to {alias.of}" for part in checkpoint._parts for alias in part.aliases})
    values = {name: digest(_canonical(value_node(value))) for name, value in checkpoint.values.items()}
    for part in checkpoint._parts:
        if part.rank:  # what rank 0 has for itself is among the values
            own = {f"@{part.rank}.{place}": digest(_canonical(node)) for place, node in part.local.items()}
            values.update(own)
    return Contents(leaves, values)


def _canonical(node: Node) -> bytes:
    """Equal for equal values. Members of a set have no order: Python gives them another in each process."""
    return msgspec.json.encode(_sorted_sets(node), order="deterministic")


def _sorted_sets(node: Node) -> Node:
    if isinstance(node, list):
        return [_sorted_sets(item) for item in node]
    if isinstance(node, dict):
        plain = {key: _sorted_sets(item) for key, item in node.items()}
        for key in plain.keys() & _SETS:
            members = plain[key]
            if isinstance(members, list):
                plain[key] = sorted(members, key=msgspec.json.encode)
        return plain
    return node
