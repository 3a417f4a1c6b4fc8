"""What a power cut may leave: a file system that keeps its word and not an inch more.

The engine's seam records every operation that changes the file system (`holdfast.engine.faults.traced`).
Replayed into a `Disk`, at any point between two operations `Disk.crashes` gives the directory trees that a
machine could find when it comes up again. The method is that of ALICE (Pillai et al., OSDI 2014); the rules
are those of POSIX, not of one file system.

Objects and names
    Files and directories are objects. A name is an entry in a directory object and points to an object, so
    what was written through ``a.partial/f`` is in ``a/f`` after a rename of the directory.

What is certain
    ``sync(file)``   all earlier data and sizes of that file object; neither its name nor anything else.
    ``sync_dir(d)``  all earlier changes of the entries of that directory object; neither its own name in its
                     parent nor what its entries point to.

What is pending (everything since): each of these has reached the disk or not, by itself, in any order
    a write          sector by sector (512 bytes), or page by page (4096).
    a size           truncate, fallocate, or growth by a write. A file may have grown without its data: the
                     new part then reads as zeros or, unless it was preallocated, as what the device held.
    an entry         create, mkdir, rename, exchange, unlink, rmdir. Each is atomic, and builds on the changes
                     that gave its names their objects: no name can be moved on the disk before it is there.
                     Other than that, a later one may be there and an earlier one not, in one directory too.

A crash inside of an operation is a crash right after it, with any part of it lost. Not here: objects that
were synced and come back different. That is damage, and `test_damage` is about it.

All subsets of pending entry changes are tried as long as there are few; sectors are lost and kept one at a
time, all together, and at random from a seeded generator (`Budget`). `test_power_model` shows that the model
can lose all of the above, `test_planted_bugs` that protocols which rely on what it can lose are caught.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.faults import Event

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


# --- the whole disk -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Image:
    """A tree of directories (None) and files (their content), by relative path."""

    tree: Mapping[str, bytes | None]

    def digest(self) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for path, content in sorted(self.tree.items()):
            total.update(repr((path, None if content is None else len(content))).encode())
            total.update(content or b"")
        return total.digest()

    def __str__(self) -> str:
        sizes = [
            f"{path}/" if data is None else f"{path} ({len(data)})"
            for path, data in sorted(self.tree.items())
        ]
        return ", ".join(sizes) or "nothing"

    def write(self, where: Path) -> None:
        """Makes `where` this tree: what else was there goes."""
        clear(where)
        for path, content in sorted(self.tree.items()):
            target = os.path.join(where, path)
            if content is None:
                os.mkdir(target)
            else:
                with open(target, "wb") as file:
                    file.write(content)


@dataclass(frozen=True, slots=True)
class Budget:
    """How far the enumeration goes at each point of a trace."""

    names: int = 64
    """Sets of entry changes, at most; all of them when there are no more."""
    torn: int = 3
    """Random losses of sectors for each set of entries."""
    single: bool = True
    """Also lose, and also keep, every sector by itself."""


class Disk:
    """A replayed trace: what is certain, what is pending, and what a crash may make of it."""

    def __init__(self, root: Path, image: Image | None = None) -> None:
        """`image`: what was there, and durable, before the trace."""
        self._root = os.fspath(root)
        self._nodes: dict[int, File | Directory] = {0: Directory()}
        self._opened: dict[str, File] = {}
        self._numbers = itertools.count(1)
        for path, content in sorted((image.tree if image else {}).items()):
            parent, name = self._parent(os.path.join(self._root, path))
            node = Directory() if content is None else File(content, size=len(content))
            parent.change({name: None}, {name: self._add(node)})
            parent.sync()

    # Replaying.

    def replay(self, event: Event) -> None:
        match event.call:
            case "open":
                if event.creates:
                    parent, name = self._parent(event.path)
                    parent.change({name: None}, {name: self._add(File())})
                # Files are written and synced through the descriptor, whatever happens to the name.
                self._opened[event.path] = self._file(event.path)
            case "write":
                file = self._opened[event.path]
                file.pending += atoms_of_write(event.offset, event.data, file.size)
                file.size = max(file.size, event.offset + len(event.data))
            case "fallocate":
                file = self._opened[event.path]
                if event.nbytes > file.size:
                    file.pending.append(Resize(event.nbytes, reserved=True))
                    file.size = event.nbytes
            case "truncate":
                file = self._opened[event.path]
                file.pending.append(Resize(event.nbytes, reserved=True))
                file.size = event.nbytes
            case "sync":
                self._opened[event.path].sync()
            case "sync_dir":
                self._directory(event.path).sync()
            case "mkdir":
                parent, name = self._parent(event.path)
                parent.change({name: None}, {name: self._add(Directory())})
            case "unlink" | "rmdir":
                parent, name = self._parent(event.path)
                parent.change({name: parent.live[name]}, {name: None})
            case "rename" | "exchange":
                parent, name = self._parent(event.path)
                other_parent, other = self._parent(event.path2)
                if parent is not other_parent:
                    raise NotImplementedError("a rename between directories: say first which syncs cover it")
                before = {name: parent.live[name], other: parent.live.get(other)}
                swapped = before[other] if event.call == "exchange" else None
                parent.change(before, {name: swapped, other: before[name]})
            case _:
                raise NotImplementedError(event.call)

    def _add(self, node: File | Directory) -> int:
        number = next(self._numbers)
        self._nodes[number] = node
        return number

    def _lookup(self, path: str) -> File | Directory:
        relative = os.path.relpath(path, self._root)
        if relative.startswith(".."):
            raise ValueError(f"{path} is outside of the modelled directory")
        node = self._nodes[0]
        for name in [] if relative == "." else relative.split("/"):
            assert isinstance(node, Directory)
            node = self._nodes[node.live[name]]
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._directory(os.path.dirname(path)), os.path.basename(path)

    def _directory(self, path: str) -> Directory:
        node = self._lookup(path)
        assert isinstance(node, Directory)
        return node

    def _file(self, path: str) -> File:
        node = self._lookup(path)
        assert isinstance(node, File)
        return node

    # Crashing.

    def live_image(self) -> Image:
        """What the running system sees, and a process finds that is started after another was killed."""
        names = {n: node.live for n, node in self._nodes.items() if isinstance(node, Directory)}
        return self._image(names, File.live)

    def crashes(self, budget: Budget, rng: random.Random) -> Iterator[Image]:
        """Trees that a power cut now may leave. Not all of them differ."""
        for names in self._namespaces(budget.names, rng):
            yield self._image(names, lambda file: file.durable)
            yield self._image(names, File.live)
            if any(isinstance(self._nodes[n], File) and self._nodes[n].pending for n in self._found(names)):
                for _ in range(budget.torn):
                    yield self._image(names, _tearing(rng))
        if budget.single:
            yield from self._one_at_a_time()

    def _one_at_a_time(self) -> Iterator[Image]:
        names = {n: node.live for n, node in self._nodes.items() if isinstance(node, Directory)}
        for number in sorted(self._found(names)):
            torn = self._nodes[number]
            if not isinstance(torn, File):
                continue
            for i in range(len(torn.pending)):
                for kept in (
                    [*torn.pending[:i], *torn.pending[i + 1 :]],
                    [torn.pending[i]],
                    torn.pending[:i],
                ):
                    content = render(torn.durable, kept)
                    yield self._image(names, lambda file, c=content, t=torn: c if file is t else file.live())

    def _namespaces(self, limit: int, rng: random.Random) -> Iterator[dict[int, Entries]]:
        """What all directories together may hold: number of the directory -> its entries."""
        choices = {n: self._nodes[n].variants(limit, rng) for n in self._reachable_directories()}
        if math.prod(map(len, choices.values())) <= limit:
            for combination in itertools.product(*choices.values()):
                yield dict(zip(choices, combination, strict=True))
            return
        # Too many: all lost, all there, each directory's variants with the others as they are, and a sample.
        durable = {n: self._nodes[n].durable for n in choices}
        live = {n: self._nodes[n].live for n in choices}
        yield durable
        yield live
        for number, variants in choices.items():
            for entries in variants:
                yield {**live, number: entries}
        for _ in range(limit):
            yield {n: rng.choice(variants) for n, variants in choices.items()}

    def _reachable_directories(self) -> list[int]:
        """Directories that some crash may show. What was removed for certain is gone with all its changes."""
        found, ahead = [], [0]
        while ahead:
            number = ahead.pop()
            node = self._nodes[number]
            if isinstance(node, Directory) and number not in found:
                found.append(number)
                ahead += sorted(node.mentioned())
        return found

    def _found(self, names: Mapping[int, Entries]) -> set[int]:
        found, ahead = set(), [0]
        while ahead:
            number = ahead.pop()
            found.add(number)
            ahead += names.get(number, {}).values()
        return found

    def _image(self, names: Mapping[int, Entries], content: Callable[[File], bytes]) -> Image:
        tree: dict[str, bytes | None] = {}

        def descend(number: int, prefix: str) -> None:
            for name, child in names[number].items():
                node = self._nodes[child]
                if isinstance(node, File):
                    tree[prefix + name] = content(node)
                else:
                    tree[prefix + name] = None
                    descend(child, f"{prefix}{name}/")

        descend(0, "")
        return Image(tree)


def _tearing(rng: random.Random) -> Callable[[File], bytes]:
    """Loses a random part of what is pending; each call of the result draws anew."""

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


def clear(where: Path) -> None:
    """Empties a directory of the shallow kind that images are."""
    with os.scandir(where) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                clear(Path(entry.path))
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


def image_of(where: Path, leave_out: Sequence[str] = ()) -> Image:
    """The tree that is there now."""
    tree: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(where):
        for name in folders:
            tree[os.path.relpath(os.path.join(folder, name), where)] = None
        for name in files:
            if name not in leave_out:
                path = os.path.join(folder, name)
                tree[os.path.relpath(path, where)] = Path(path).read_bytes()
    return Image(tree)
