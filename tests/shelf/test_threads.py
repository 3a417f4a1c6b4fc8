"""Threads that read while another one commits: each read is whole, and of one commit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep import Shelf

ABSENT = object()
LARGE = 60_000
"""Numbers of an array whose verification lets other threads run."""


@pytest.fixture(autouse=True)
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _array(kind: str, length: int) -> Callable[[int], Any]:
    return lambda number: np.full(length + number % 7, number, kind)


KINDS: list[Callable[[int], Any]] = [
    _array("f8", LARGE),
    _array("i4", 2 * LARGE),
    lambda number: number,
    lambda number: ABSENT,
    _array("f8", 3),
    lambda number: number.to_bytes(8, "little") * (LARGE + number % 5),
    lambda number: {"number": number, "array": np.full(LARGE + number, number)},
    lambda number: None,
    lambda number: [number, str(number) * 300],
    _array("u1", 0),
    _array("i8", LARGE),
]
NAMES = range(4)


def expected(name: int, number: int) -> Any:
    """What the writer gives a name in a commit: another type and another size each time."""
    return KINDS[(3 * name + number) % len(KINDS)](number)


def same(found: Any, wanted: Any) -> bool:
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, np.ndarray):
        return (found.dtype, found.shape) == (
            wanted.dtype,
            wanted.shape,
        ) and found.tobytes() == wanted.tobytes()
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


class Beside:
    """Threads that do something again and again until the block ends. What they raise ends the test."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self.done = threading.Event()
        self.failed: list[BaseException] = []
        self.turns = [0] * len(works)
        self._threads = [
            threading.Thread(target=self._run, args=(number, work), daemon=True)
            for number, work in enumerate(works)
        ]

    def _run(self, number: int, work: Callable[[], None]) -> None:
        try:
            while not self.done.is_set():
                work()
                self.turns[number] += 1
        except BaseException as error:
            self.failed.append(error)
            self.done.set()

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        for thread in self._threads:
            thread.join()
        if self.failed:
            raise self.failed[0]


def test_threads_read_one_commit_while_another_thread_commits(memory: Path) -> None:
    with Shelf(memory / "a.shelf", "256MiB") as shelf:
        numbers = {1: 0}  # generation -> number of the commit

        def read(name: int) -> None:
            first = shelf.generation
            try:
                found = shelf[str(name)]
            except KeyError:
                found = ABSENT
            last = shelf.generation
            wanted = [expected(name, numbers[at]) if numbers[at] else ABSENT for at in range(first, last + 1)]
            assert any(same(found, value) for value in wanted), (name, first, last, found, wanted)

        def verify() -> None:
            assert shelf.verify() == []
            assert set(shelf) <= set(map(str, NAMES))

        with Beside(*(partial(read, name) for name in NAMES), verify) as readers:
            commits = 0
            while commits < 200 or (min(readers.turns) < 10 and not readers.done.is_set()):
                commits += 1
                numbers[shelf.generation + 1] = commits
                with shelf.transaction():
                    for name in NAMES:
                        value = expected(name, commits)
                        if value is not ABSENT:
                            shelf[str(name)] = value
                        elif str(name) in shelf:
                            del shelf[str(name)]


def test_an_array_keeps_its_bytes_while_other_threads_commit(memory: Path) -> None:
    with Shelf(memory / "a.shelf", "64MiB") as shelf:
        shelf.a = np.zeros(LARGE)

        def read() -> None:
            array = shelf.a
            before = array[0]
            for _ in range(20):
                assert (array == before).all()

        with Beside(read, read) as readers:
            commits = 0
            while commits < 100 or (min(readers.turns) < 10 and not readers.done.is_set()):
                commits += 1
                shelf.a = np.full(LARGE, float(commits))


def test_a_thread_that_reads_while_another_closes_gets_whole_values_or_an_error(memory: Path) -> None:
    path = memory / "a.shelf"
    with Shelf(path, "64MiB") as shelf:
        shelf.a = np.arange(LARGE)
    for mode in ("r", "w") * 10:
        shelf = Shelf(path, mode=mode)  # type: ignore[arg-type]

        def read(shelf: Shelf = shelf) -> None:
            try:
                found = shelf.a
            except everystep.errors.ShelfClosed:
                return
            assert found[-1] == LARGE - 1

        with Beside(read, read) as readers:
            while min(readers.turns) < 3 and not readers.done.is_set():
                pass
            shelf.close()
            last = sum(readers.turns) + 4
            while sum(readers.turns) < last and not readers.done.is_set():
                pass


def test_what_a_thread_leaves_open_when_it_ends_is_undone(memory: Path) -> None:
    path = memory / "a.shelf"
    shelf = Shelf(path)
    shelf.a = 1
    kept = []

    def leave_open() -> None:
        transaction = shelf.transaction()
        kept.append(transaction)  # or it would end with the last reference to it
        transaction.__enter__()
        shelf.a = 2

    def run(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    run(leave_open)
    assert shelf.a == 1
    shelf.a = 3
    assert shelf.a == 3
    run(leave_open)
    shelf.close()
    with Shelf(path) as shelf:
        assert shelf.a == 3


def test_a_block_whose_transaction_ended_with_its_thread_raises(memory: Path) -> None:
    with Shelf(memory / "a.shelf") as shelf:
        shelf.a = 1
        transaction = shelf.transaction()

        def leave_open() -> None:
            transaction.__enter__()
            shelf.a = 2

        thread = threading.Thread(target=leave_open)
        thread.start()
        thread.join()
        shelf.a = 3  # which ends it
        for again in (transaction, shelf.transaction()):
            with pytest.raises(everystep.errors.TransactionError, match="not begun, or has ended"):
                again.__exit__(None, None, None)
        assert shelf.a == 3


def test_a_transaction_that_nothing_refers_to_is_undone(memory: Path) -> None:
    with Shelf(memory / "a.shelf") as shelf:
        shelf.transaction().__enter__()
        shelf.a = 3
        assert shelf.a == 3


def test_a_block_that_ends_in_another_thread_is_undone(memory: Path) -> None:
    with Shelf(memory / "a.shelf") as shelf:
        shelf.a = 1

        def steps() -> Iterator[None]:
            with shelf.transaction():
                shelf.a = 2
                yield

        raised: list[BaseException] = []

        def finish(begun: Iterator[None]) -> None:
            try:
                next(begun)
            except BaseException as error:
                raised.append(error)

        begun = steps()
        next(begun)
        thread = threading.Thread(target=finish, args=(begun,))
        thread.start()
        thread.join()
        assert [type(error) for error in raised] == [everystep.errors.TransactionError]
        assert "another thread" in str(raised[0])
        assert shelf.a == 1
        shelf.a = 3
