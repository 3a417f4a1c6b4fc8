"""What a run must look like, restated as plainly as possible; and ways to damage a real one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import everystep
from everystep import Keep
from everystep.checkpointer import Kept

SHARD = "r00000.v0.safetensors"


def wanted(keep: Keep, history: Sequence[Kept]) -> set[int]:
    """The steps that stay: one rule after the other, each in the words of its documentation."""
    stay: set[int] = set()
    for place, item in enumerate(history):
        newer = len(history) - place - 1
        if newer < keep.last:
            stay.add(item.step)
        if keep.every is not None and item.step % keep.every == 0:
            stay.add(item.step)
    if keep.best is not None:
        metric, direction, count = keep.best
        rated = [item for item in history if not math.isnan(item.metrics.get(metric, math.nan))]
        for item in rated:
            mine = item.metrics[metric]
            better = [
                other
                for other in rated
                if (other.metrics[metric] < mine if direction == "min" else other.metrics[metric] > mine)
                or (other.metrics[metric] == mine and other.step > item.step)
            ]
            if len(better) < count:
                stay.add(item.step)
    if keep.seconds is not None:
        last = -math.inf
        for item in history:
            if last == -math.inf or abs(item.created - last) >= keep.seconds:
                stay.add(item.step)
                last = item.created
    return stay


@dataclass
class Entry:
    """One checkpoint that should be there. `candidate`: the writer counts it among those to keep."""

    version: int
    metrics: Mapping[str, float]
    damage: str | None = None
    candidate: bool = True


@dataclass
class Model:
    keep: Keep
    entries: dict[int, Entry] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    """Later than the step that training went back to: the next save gives them up."""
    resumed: bool = True
    ours: set[int] = field(default_factory=set)
    """What this training has resumed from or saved."""
    passed: set[int] = field(default_factory=set)
    """What it has found damaged."""
    outdated: set[int] = field(default_factory=set)
    """What a training that starts over gives up for its first checkpoint."""

    def refuses(self, step: int) -> type[everystep.EverystepError] | None:
        """The error of a save of that step: the run is another training's, or the checkpoint is."""
        if not self.resumed and not self.outdated:
            return everystep.errors.RunInUse
        if step in self.entries and step not in self.ours | self.passed | self.superseded | self.outdated:
            return everystep.CheckpointExists
        return None

    def save(self, step: int, version: int, metrics: Mapping[str, float]) -> int:
        """Returns how many checkpoints were given up for it."""
        self.entries[step] = Entry(version, metrics)
        self.superseded |= self.outdated
        self.outdated = set()
        self.resumed = True
        known = [
            Kept(number, 0.0, entry.metrics)
            for number, entry in sorted(self.entries.items())
            if entry.candidate and (number == step or number not in self.superseded)
        ]
        stay = wanted(self.keep, known) | {step}
        gone = [item.step for item in known if item.step not in stay]
        gone += sorted((self.superseded & set(self.entries)) - {step})
        self.superseded = set()
        for number in gone:
            del self.entries[number]
        self.ours = {number for number in (*self.ours, step) if number in self.entries}
        self.passed.discard(step)
        return len(gone)

    def restore(self) -> tuple[int | None, list[int]]:
        """The step to come back to (None: none is whole; 0: there are none), and those passed over."""
        passed = []
        for step in sorted(self.entries, reverse=True):
            if self.entries[step].damage is None:
                self.superseded = set()
                self.resumed = True
                self.ours.add(step)
                return step, passed
            passed.append(step)
            self.passed.add(step)
            self.entries[step].candidate = False
        self.resumed = self.resumed or not passed
        return (None if passed else 0), passed

    def restore_one(self, step: int) -> None:
        self.superseded = {other for other in self.entries if other > step}
        self.resumed = True
        self.ours.add(step)

    def reopen(self, *, start_over: bool) -> None:
        """A new process sees at once what is damaged, as far as that shows without reading all bytes."""
        self.superseded, self.ours, self.passed = set(), set(), set()
        self.resumed = not self.entries
        self.outdated = set(self.entries) if start_over else set()
        for entry in self.entries.values():
            entry.candidate = entry.damage in (None, "shard")

    @property
    def last_durable(self) -> int | None:
        known = {step for step, entry in self.entries.items() if entry.candidate}
        return max(known & self.ours - self.superseded, default=None)


def hurt(checkpoint: Path, kind: str) -> None:
    """Damages a checkpoint on disk: "shard", "manifest", "missing" or "truncated"."""
    shard = checkpoint / SHARD
    if kind == "manifest":
        # A small one has it in the shard's header.
        plain = checkpoint / "manifest.json"
        path, place = (plain, 300) if plain.exists() else (shard, 1000)
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
    elif kind == "missing":
        shard.unlink()
    elif kind == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        assert kind == "shard"
        with shard.open("r+b") as file:
            place = 8 + int.from_bytes(file.read(8), "little") + 3  # behind the header
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))
