"""Ways to keep named arrays in a file across crashes, each driven by the same random histories.

The shelf itself; PyMM's way (in place, with a dirty mark for each variable and no way back); `np.savez` over
the same path; and `np.savez` to a temporary file that is renamed. Each yields an `Outcome`: what a crash at
any moment leaves.
"""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import everystep
from everystep import Shelf
from everystep.engine import faults
from support.shelves.shelf_crashes import PAGE, WORD, Content, Disk, Noticed, Outcome, Timeline, judge, survey

Array = np.ndarray[Any, Any]
Change = dict[str, Array | int | None]
"""What one transaction does: name -> a new array or number; None removes it."""

UNITS = {"page cache": PAGE, "persistent memory": WORD}


def history(seed: int, transactions: int, largest: int = 600) -> list[Change]:
    """Random transactions over a few names, most of which change several."""
    rng = random.Random(seed)
    known: set[str] = set()
    changes: list[Change] = []
    for number in range(transactions):
        change: Change = {}
        for name in rng.sample("abcde", rng.randint(1, 4)):
            if name in known and rng.random() < 0.15:
                change[name] = None
            elif rng.random() < 0.2:
                change[name] = rng.randrange(1 << 40)
            else:
                # Each transaction writes its own number everywhere: a mixture of two cannot look like either.
                change[name] = np.full(rng.randint(1, largest), float(number + 1))
        known = {name for name in {*known, *change} if change.get(name, 0) is not None}
        changes.append(change)
    return changes


def after(content: Content, change: Change) -> Content:
    new = {**content, **{name: comparable(value) for name, value in change.items()}}
    return {name: value for name, value in new.items() if value is not None}


def comparable(value: Any) -> Any:
    return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def content_of(shelf: Shelf) -> Content:
    return {name: comparable(shelf[name]) for name in shelf}


# --- the shelf ----------------------------------------------------------------------------------------------


class ShelfRecorder:
    """A shelf at work, all that it does to its file recorded beside what it should hold."""

    def __init__(self, path: Path, medium: str, size: str = "16MiB") -> None:
        self.path = path
        self.medium = medium
        path.unlink(missing_ok=True)
        with Shelf(path, size):
            pass
        self.timeline = Timeline(path.read_bytes())
        self.content: Content = {}
        self.shelf = self._open([self.content])

    def _open(self, allowed: list[Content]) -> Shelf:
        finally_: list[Content] = []
        with self.timeline.recorded(allowed, finally_):
            shelf = Shelf(self.path, _medium=self.medium)
        self.content = content_of(shelf)
        finally_.append(self.content)
        return shelf

    def commit(self, change: Change, *, in_place: bool = False) -> None:
        before, self.content = self.content, after(self.content, change)
        with self.timeline.recorded([before, self.content], [self.content]):
            self._apply(change, in_place)

    def _apply(self, change: Change, in_place: bool = False) -> None:
        shelf = self.shelf
        with shelf.transaction():
            for name, value in change.items():
                shape = getattr(shelf.get(name), "shape", None)
                if value is None:
                    if name in shelf:
                        del shelf[name]
                elif in_place and isinstance(value, np.ndarray) and shape == value.shape:
                    shelf.writable(name)[...] = value
                else:
                    shelf[name] = value

    def roll_back(self, change: Change) -> None:
        with self.timeline.recorded([self.content], [self.content]):
            try:
                with self.shelf.transaction():
                    for name, value in change.items():
                        if value is not None:
                            self.shelf[name] = value
                    raise InterruptedError
            except InterruptedError:
                pass

    def reopen(self) -> None:
        self.shelf.close()
        self.shelf = self._open([self.content])

    def fail_to_sync(self, change: Change) -> None:
        """The commit's last step fails, as if the process were killed there; then another opens the file."""
        both = [self.content, after(self.content, change)]
        step = "sync" if self.medium == "page cache" else "fence"
        last = 2 if self.medium != "page cache" else 1
        with self.timeline.recorded(both, both):
            try:
                with faults.injected(f"{step}:{last}:EIO"):
                    self._apply(change)
            except everystep.SaveFailed:
                pass
            else:
                raise AssertionError("the commit was to fail")
        self.shelf.close()
        self.shelf = self._open(both)

    def close(self) -> None:
        self.shelf.close()


class ShelfRecovery:
    """Opens a crash state. Every now and then also to write: it must be as good as new."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "crashed.shelf"
        self._count = 0

    def __call__(self, image: bytes) -> Content:
        self._path.write_bytes(image)
        self._count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", everystep.ShelfWarning)
            try:
                if self._count % 16:
                    with Shelf(self._path, mode="r") as shelf:
                        return content_of(shelf)
                return self._use()
            except everystep.EverystepError as error:
                raise Noticed(str(error)) from error

    def _use(self) -> Content:
        with Shelf(self._path, _medium="memory") as shelf:
            found = content_of(shelf)
            shelf["later"] = np.arange(700)
            shelf["later"] = np.arange(900)
        with Shelf(self._path, mode="r") as shelf:
            assert content_of(shelf) == {**found, "later": comparable(np.arange(900))}
        return found


def shelf_outcome(
    directory: Path, medium: str, seed: int, *, transactions: int, per_point: int, largest: int = 600
) -> Outcome:
    """A history with rollbacks, reopenings and failed syncs, and a crash at every point of it."""
    recorder = ShelfRecorder(directory / f"{seed}.shelf", medium)
    rng = random.Random(seed)
    for change in history(seed, transactions, largest):
        kind = rng.random()
        if kind < 0.1:
            recorder.roll_back(change)
        elif kind < 0.2:
            recorder.reopen()
        elif kind < 0.3:
            recorder.fail_to_sync(change)
        recorder.commit(change, in_place=rng.random() < 0.4)
    recorder.close()
    recover = ShelfRecovery(directory)
    return survey(recorder.timeline, recover, unit=UNITS[medium], per_point=per_point, seed=seed)


# --- in place, with dirty marks -----------------------------------------------------------------------------


def in_place_outcome(medium: str, seed: int, *, transactions: int, per_point: int) -> Outcome:
    """PyMM's way: each variable has a mark that is set while it is changed in place. There is no way back.

    Every step is synced or fenced properly. So a variable that was cut off shows its mark; but a transaction
    over several variables has no mark of its own.
    """
    scheme = InPlace("abcde", 600)
    disk = Disk(UNITS[medium], scheme.empty())
    outcome = Outcome()
    rng = random.Random(seed)
    content: Content = {}
    for change in history(seed, transactions):
        new = after(content, change)
        for event in scheme.events(change, medium):
            disk.apply(event)
            for image in disk.states(per_point, rng):
                judge(outcome, scheme.recover, image, [content, new], event.call)
        content = new
    return outcome


class InPlace:
    """A file of fixed places: for each variable a dirty mark, a length, and room for its bytes."""

    def __init__(self, names: str, largest: int) -> None:
        self._places = {name: PAGE + i * 2 * PAGE for i, name in enumerate(names)}
        self._nbytes = PAGE * (1 + 2 * len(names))
        assert largest * 8 + 24 <= 2 * PAGE

    def empty(self) -> bytes:
        return bytes(self._nbytes)

    def events(self, change: Change, medium: str) -> Iterator[faults.TracedCall]:
        for name, value in change.items():
            at = self._places[name]
            data, kind = b"", 0
            if isinstance(value, np.ndarray):
                data, kind = value.tobytes(), 1
            elif value is not None:
                data, kind = struct.pack("<q", value), 2
            yield from self._settled(at, struct.pack("<q", 1), medium)
            yield from self._settled(at + 8, struct.pack("<qq", kind, len(data)) + data, medium)
            yield from self._settled(at, struct.pack("<q", 0), medium)

    def _settled(self, offset: int, data: bytes, medium: str) -> Iterator[faults.TracedCall]:
        def event(call: str, data: bytes = b"") -> faults.TracedCall:
            return faults.TracedCall(call, "f", "", offset, len(data), data, False)

        if medium == "page cache":
            yield event("write", data)
            yield event("sync")
        else:
            yield event("store", data)
            yield faults.TracedCall("write_back", "f", "", offset, len(data), b"", False)
            yield event("fence")

    def recover(self, image: bytes) -> Content:
        found: Content = {}
        for name, at in self._places.items():
            dirty, kind, nbytes = struct.unpack_from("<qqq", image, at)
            if dirty:
                raise Noticed(f"{name} is marked dirty")
            data = image[at + 24 : at + 24 + nbytes]
            if kind == 1:
                found[name] = comparable(np.frombuffer(data))
            elif kind == 2:
                found[name] = struct.unpack("<q", data)[0]
        return found


# --- np.savez -----------------------------------------------------------------------------------------------


def savez_outcome(seed: int, *, transactions: int, per_point: int, rename: bool) -> Outcome:
    """`np.savez` as people use it, without a sync: over the same path, or to another one that is renamed."""
    outcome = Outcome()
    rng = random.Random(seed)
    content: Content = {}
    arrays: dict[str, Any] = {}
    before = b""
    for change in history(seed, transactions):
        arrays = {n: v for n, v in {**arrays, **change}.items() if v is not None}
        new = after(content, change)
        data = _npz(arrays)
        # Between two saves lie seconds: what the last one wrote is taken to have reached the disk by itself.
        disk = Disk(PAGE, b"" if rename else before)
        events = [] if rename else [faults.TracedCall("truncate", "f", "", 0, 0, b"", False)]
        events += [
            faults.TracedCall("write", "f", "", at, 0, data[at : at + PAGE], False)
            for at in range(0, len(data), PAGE)
        ]
        for index, event in enumerate(events):
            disk.apply(event)
            renamed = rename and index == len(events) - 1
            for image in disk.states(per_point, rng):
                judge(
                    outcome, _load_npz, image if renamed or not rename else before, [content, new], event.call
                )
                if renamed:  # the rename may not have made it
                    judge(outcome, _load_npz, before, [content, new], "rename")
        content, before = new, data
    return outcome


def _npz(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _load_npz(image: bytes) -> Content:
    if not image:
        return _nothing()
    try:
        with np.load(io.BytesIO(image)) as found:
            return {
                name: int(found[name]) if found[name].ndim == 0 else comparable(found[name])
                for name in found.files
            }
    except Exception as error:  # whatever numpy says of a file that is not whole
        raise Noticed(str(error)) from error


def _nothing() -> Content:
    raise Noticed("the file is empty")


# --- the table ----------------------------------------------------------------------------------------------

Row = tuple[str, str, Callable[[Path, int], Outcome]]


def rows(transactions: int, per_point: int) -> list[Row]:
    """Scheme, medium, and how to survey it for one seed."""
    made: list[Row] = []
    for medium in UNITS:
        made.append((
            "shelf",
            medium,
            lambda directory, seed, medium=medium: shelf_outcome(
                directory, medium, seed, transactions=transactions, per_point=per_point
            ),
        ))  # fmt: skip
    for medium in UNITS:
        made.append((
            "in place with dirty marks (PyMM)",
            medium,
            lambda directory, seed, medium=medium: in_place_outcome(
                medium, seed, transactions=transactions, per_point=per_point
            ),
        ))  # fmt: skip
    for title, rename in (("np.savez over the same path", False), ("np.savez and rename, no sync", True)):
        made.append((
            title,
            "page cache",
            lambda directory, seed, rename=rename: savez_outcome(
                seed, transactions=transactions, per_point=per_point, rename=rename
            ),
        ))  # fmt: skip
    return made


def scratch(tmp_path: Path) -> Path:
    """In memory where that is possible: a survey writes thousands of files, and syncs none."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        return tmp_path
    import tempfile

    return Path(tempfile.mkdtemp(prefix="shelf-crashes-", dir=shared))
