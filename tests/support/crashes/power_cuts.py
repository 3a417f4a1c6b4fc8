"""What a power cut may leave: a file system that keeps its word and not an inch more.

The engine's seam records every operation that changes the file system (`everystep.engine.faults.traced`).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from everystep.engine.faults import TracedCall
from support.crashes.disk_objects import Directory, Entries, File, Resize, atoms_of_write, tearing

_Object = TypeVar("_Object", File, Directory)


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
        self._directories: dict[int, Directory] = {0: Directory()}
        self._files: dict[int, File] = {}
        self._opened: dict[str, File] = {}
        self._numbers = itertools.count(1)
        for path, content in sorted((image.tree if image else {}).items()):
            parent, name = self._parent(os.path.join(self._root, path))
            if content is None:
                parent.change({name: None}, {name: self._add(self._directories, Directory())})
            else:
                file = File(content, size=len(content))
                parent.change({name: None}, {name: self._add(self._files, file)})
            parent.sync()

    # Replaying.

    def replay(self, event: TracedCall) -> None:
        match event.call:
            case "open":
                if event.creates:
                    parent, name = self._parent(event.path)
                    parent.change({name: None}, {name: self._add(self._files, File())})
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
                parent.change({name: None}, {name: self._add(self._directories, Directory())})
            case "unlink" | "rmdir":
                parent, name = self._parent(event.path)
                parent.change({name: parent.live[name]}, {name: None})
            case "link":
                parent, name = self._parent(event.path2)
                source, known = self._parent(event.path)
                parent.change({name: None}, {name: source.live[known]})
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

    def _add(self, to: dict[int, _Object], made: _Object) -> int:
        number = next(self._numbers)
        to[number] = made
        return number

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._directory(os.path.dirname(path)), os.path.basename(path)

    def _directory(self, path: str) -> Directory:
        relative = os.path.relpath(path, self._root)
        if relative.startswith(".."):
            raise ValueError(f"{path} is outside of the modelled directory")
        found = self._directories[0]
        for name in [] if relative == "." else relative.split("/"):
            found = self._directories[found.live[name]]
        return found

    def _file(self, path: str) -> File:
        parent, name = self._parent(path)
        return self._files[parent.live[name]]

    # Crashing.

    def live_image(self) -> Image:
        """What the running system sees, and a process finds that is started after another was killed."""
        return self._image(self._live(), File.live)

    def crashes(self, budget: Budget, rng: random.Random) -> Iterator[Image]:
        """Trees that a power cut now may leave. Not all of them differ."""
        for names in self._namespaces(budget.names, rng):
            yield self._image(names, lambda file: file.durable)
            yield self._image(names, File.live)
            if any(file.pending for file in self._shown(names)):
                for _ in range(budget.torn):
                    yield self._image(names, tearing(rng))
        if budget.single:
            names = self._live()
            for torn in self._shown(names):
                for content in torn.losing_one():
                    yield self._image(names, _replacing(torn, content))

    def _live(self) -> dict[int, Entries]:
        return {number: directory.live for number, directory in self._directories.items()}

    def _namespaces(self, limit: int, rng: random.Random) -> Iterator[dict[int, Entries]]:
        """What all directories together may hold: number of the directory -> its entries."""
        reachable = self._reachable()
        choices = {number: directory.variants(limit, rng) for number, directory in reachable.items()}
        if math.prod(map(len, choices.values())) <= limit:
            for combination in itertools.product(*choices.values()):
                yield dict(zip(choices, combination, strict=True))
            return
        # Too many: all lost, all there, each directory's variants with the others as they are, and a sample.
        live = {number: directory.live for number, directory in reachable.items()}
        yield {number: directory.durable for number, directory in reachable.items()}
        yield live
        for number, variants in choices.items():
            for entries in variants:
                yield {**live, number: entries}
        for _ in range(limit):
            yield {number: rng.choice(variants) for number, variants in choices.items()}

    def _reachable(self) -> dict[int, Directory]:
        """Directories that some crash may show. What was removed for certain is gone with all its changes."""
        found: dict[int, Directory] = {}
        ahead = [0]
        while ahead:
            number = ahead.pop()
            if number in self._directories and number not in found:
                found[number] = self._directories[number]
                ahead += sorted(found[number].mentioned())
        return found

    def _shown(self, names: Mapping[int, Entries]) -> list[File]:
        """The files that can be found under these names."""
        found, ahead = set(), [0]
        while ahead:
            number = ahead.pop()
            found.add(number)
            ahead += names.get(number, {}).values()
        return [self._files[number] for number in sorted(found) if number in self._files]

    def _image(self, names: Mapping[int, Entries], content: Callable[[File], bytes]) -> Image:
        tree: dict[str, bytes | None] = {}

        def descend(number: int, prefix: str) -> None:
            for name, child in names[number].items():
                if child in self._files:
                    tree[prefix + name] = content(self._files[child])
                else:
                    tree[prefix + name] = None
                    descend(child, f"{prefix}{name}/")

        descend(0, "")
        return Image(tree)


def _replacing(torn: File, content: bytes) -> Callable[[File], bytes]:
    """Everything as it is, but one file with that content."""
    return lambda file: content if file is torn else file.live()


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
