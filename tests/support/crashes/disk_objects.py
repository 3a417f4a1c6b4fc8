"""Files and directories as `power_cuts` sees them: what is on the disk for certain, and what is under way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

SECTOR = 512
PAGE = 4096
ZEROS = b"\0"
GARBAGE = b"\xa5"

Entries = dict[str, int]
"""Name -> number of the object."""


# --- pending changes of a file --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sector:
    """A part of a write that reaches the disk whole or not at all."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of size. `reserved`: what it adds is known to read as zeros."""

    nbytes: int
    reserved: bool


Atom = Sector | Resize


def atoms_of_write(offset: int, data: bytes, size_before: int) -> Iterator[Atom]:
    if offset + len(data) > size_before:
        yield Resize(offset + len(data), reserved=False)
    at = 0
    while at < len(data):
        stop = min(len(data), at + SECTOR - (offset + at) % SECTOR)
        yield Sector(offset + at, data[at:stop])
        at = stop


def render(base: bytes, atoms: Iterable[Atom], fill: bytes = ZEROS) -> bytes:
    """The content after these changes. `fill` is what an unwritten, unreserved part reads as."""
    content = bytearray(base)
    for atom in atoms:
        if isinstance(atom, Resize):
            grown = atom.nbytes - len(content)
            content[atom.nbytes :] = b""
            content += (ZEROS if atom.reserved else fill) * grown
        else:
            content += fill * (atom.offset - len(content))
            content[atom.offset : atom.offset + len(atom.data)] = atom.data
    return bytes(content)


@dataclass(slots=True)
class File:
    durable: bytes = b""
    pending: list[Atom] = field(default_factory=list)
    size: int = 0  # as the running system sees it

    def sync(self) -> None:
        self.durable = self.live()
        self.pending = []

    def live(self) -> bytes:
        return render(self.durable, self.pending)

    def losing_one(self) -> Iterator[bytes]:
        """Each part lost by itself, each kept by itself, and all from each part on lost."""
        for i in range(len(self.pending)):
            for kept in ([*self.pending[:i], *self.pending[i + 1 :]], [self.pending[i]], self.pending[:i]):
                yield render(self.durable, kept)


def tearing(rng: random.Random) -> Callable[[File], bytes]:
    """Loses a random part of what is pending; each call of the result draws again."""

    def torn(file: File) -> bytes:
        if not file.pending:
            return file.durable
        chance = rng.choice((0.1, 0.5, 0.9))
        unit = rng.choice((SECTOR, PAGE))
        fate: dict[int, bool] = {}  # by unit: a page is lost as a whole
        kept: list[Atom] = []
        for atom in file.pending:
            if isinstance(atom, Sector):
                stays = fate.setdefault(atom.offset // unit, rng.random() < chance)
            else:
                stays = rng.random() < chance
            if stays:
                kept.append(atom)
        return render(file.durable, kept, rng.choice((ZEROS, GARBAGE)))

    return torn


# --- pending changes of a directory ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A change of entries: names as they were, and as they are then. Applies only to names as they were."""

    before: Mapping[str, int | None]
    after: Mapping[str, int | None]

    def apply(self, entries: Entries) -> None:
        if any(entries.get(name) != number for name, number in self.before.items()):
            return  # builds on a change that has not reached the disk
        for name, number in self.after.items():
            if number is None:
                entries.pop(name, None)
            else:
                entries[name] = number


@dataclass(slots=True)
class Directory:
    durable: Entries = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    live: Entries = field(default_factory=dict)

    def change(self, before: Mapping[str, int | None], after: Mapping[str, int | None]) -> None:
        made = Change(before, after)
        made.apply(self.live)
        self.pending.append(made)

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.pending = []

    def variants(self, limit: int, rng: random.Random) -> list[Entries]:
        """Every distinct set of entries that may be found; a sample of `limit` if there are too many."""
        count = len(self.pending)
        if count == 0:
            return [self.durable]
        masks: Iterable[int]
        if 2**count <= limit:
            masks = range(2**count)
        else:
            prefixes = [2**length - 1 for length in range(count + 1)]
            singles = [bits for i in range(count) for bits in (1 << i, (2**count - 1) ^ (1 << i))]
            masks = [*prefixes, *singles, *(rng.getrandbits(count) for _ in range(limit))][
                : max(limit, count + 1)
            ]
        found: dict[tuple[tuple[str, int], ...], Entries] = {}
        for mask in masks:
            entries = dict(self.durable)
            for i, change in enumerate(self.pending):
                if mask >> i & 1:
                    change.apply(entries)
            found[tuple(sorted(entries.items()))] = entries
        return list(found.values())

    def mentioned(self) -> set[int]:
        """Objects that may be found here."""
        numbers = set(self.durable.values())
        for change in self.pending:
            numbers |= {number for number in change.after.values() if number is not None}
        return numbers
