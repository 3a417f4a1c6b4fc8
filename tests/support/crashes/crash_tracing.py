"""Recording a sequence of saves with its promises, and holding every crash in it against them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from everystep.engine import faults
from everystep.engine.faults import TracedCall
from support.crashes.power_cuts import Budget, Disk, Image
from support.crashes.recovery import Ledger, Mark, Recovery
from support.states.identified_states import WIDE


@dataclass(slots=True)
class Recording:
    """Operations under `root` and, between them, what the caller was told."""

    root: Path
    wide: int = WIDE
    items: list[TracedCall | Mark] = field(default_factory=list)
    start: int = 0
    """Where the interesting part begins: crashes are tried from there on."""
    calls: int = 0
    """Calls that passed the seam in the save that was told to fail."""

    @contextmanager
    def tracing(self) -> Iterator[None]:
        events: list[TracedCall] = []
        try:
            with faults.traced() as events:
                yield
        finally:
            # Also of a save that failed. What happens above the root makes it durable, as the model assumes.
            self.items += [event for event in events if event.path.startswith(f"{self.root}")]

    def mark(self, mark: Mark) -> None:
        self.items.append(mark)

    @property
    def operations(self) -> int:
        return sum(isinstance(item, TracedCall) for item in self.items)


@dataclass(slots=True)
class Tally:
    """What an enumeration has tried."""

    operations: int = 0
    images: set[bytes] = field(default_factory=set)
    seen: set[bytes] = field(default_factory=set)
    recoveries: int = 0

    @property
    def states(self) -> int:
        return len(self.images)

    @property
    def views(self) -> int:
        return len(self.seen)

    def add(self, other: Tally) -> None:
        self.operations += other.operations
        self.images |= other.images
        self.seen |= other.seen
        self.recoveries += other.recoveries

    def __str__(self) -> str:
        return (
            f"{self.operations} operations, {self.states} distinct states of the disk "
            f"({self.views} as readers see it), {self.recoveries} recoveries"
        )


@dataclass(slots=True)
class Survey:
    """Tries every crash of recordings, each once. `scratch` is where images are written and recovered."""

    scratch: Path
    recovery: Recovery
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    thorough_every: int = 25
    """Every so many states, the recovered run is also written to and read again."""
    tried: set[tuple[object, ...]] = field(default_factory=set)
    """States of the disk, each with what was promised then."""

    def __call__(self, recording: Recording, disk: Disk | None = None, ledger: Ledger | None = None) -> Tally:
        rng = random.Random(self.seed)
        disk = disk or Disk(recording.root)
        ledger = ledger or Ledger()
        tally = Tally(recording.operations)
        for position, item in enumerate(recording.items):
            if isinstance(item, TracedCall):
                disk.replay(item)
            else:
                ledger.note(item)
            if position < recording.start:
                continue
            promised = ledger.key()
            for image in disk.crashes(self.budget, rng):
                digest = image.digest()
                if (digest, promised) in self.tried:
                    continue
                self.tried.add((digest, promised))
                tally.images.add(digest)
                tally.seen.add(self._view(image))
                tally.recoveries += 1
                image.write(self.scratch)
                try:
                    thorough = len(self.tried) % self.thorough_every == 0
                    self.recovery.check(self.scratch, ledger, thorough=thorough)
                except AssertionError as error:
                    # Not only where it went wrong, but what the disk held then.
                    told = f"{error}\n after item {position} of the recording: {item!r:.300}\n with {image}"
                    raise type(error)(told) from error
        return tally

    def _view(self, image: Image) -> bytes:
        shown = self.recovery.visible(image.tree)
        inside = {
            path: data for path, data in image.tree.items() if path.startswith(tuple(f"{s}/" for s in shown))
        }
        return Image({**dict.fromkeys(shown), **inside}).digest()
