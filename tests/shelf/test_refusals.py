"""Changes that are refused or fail, and whose error is caught: the transaction goes on, and loses nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

import everystep
from everystep import Shelf
from everystep.engine import faults
from support.shelves.machines import assert_machine

STEPS = {"page cache": "write", "memory": "store", "persistent memory": "store"}
"""The call of the seam that stores bytes, by medium."""
LARGEST = 200_000
"""Numbers of an array of two blocks, which are stored by two calls."""


def same(found: Any, wanted: Any) -> bool:
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, np.ndarray):
        alike = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return alike and found.tobytes() == wanted.tobytes()
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def content(shelf: Shelf) -> dict[str, Any]:
    return {name: copy.deepcopy(shelf[name]) for name in shelf}


def test_none_replaces_an_array_that_was_changed_in_place(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf") as shelf:
        shelf.a, shelf.b, shelf.c = np.zeros(3), np.zeros(3), 7
        with shelf.transaction():
            shelf.writable("a")[0] = 1
            shelf.b = None
            shelf.c = None
            assert (shelf.b, shelf.c) == (None, None)
            shelf.a = None
        assert [shelf.a, shelf.b, shelf.c] == [None] * 3


def test_a_refused_assignment_leaves_what_was_changed_in_place(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.shelf", "1MiB") as shelf:
        shelf.a = np.zeros(3)
        with shelf.transaction():
            shelf.writable("a")[0] = 8
            for refused, error in (
                (object(), everystep.UnsupportedState),
                (np.zeros(2, [("x", int)]), everystep.UnsupportedState),
                (np.zeros(1 << 18), everystep.errors.ShelfFull),
            ):
                with pytest.raises(error):
                    shelf.a = refused
                assert shelf.a.tolist() == [8, 0, 0]
        assert shelf.a.tolist() == [8, 0, 0]


@pytest.mark.parametrize("medium", STEPS)
def test_a_second_assignment_that_fails_half_way_leaves_the_first(tmp_path: Path, medium: str) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path, _medium=medium) as shelf:
        with shelf.transaction():
            shelf.a = np.ones(LARGEST)
            with pytest.raises(everystep.SaveFailed), faults.injected(f"{STEPS[medium]}:2:EIO"):
                shelf.a = np.full(LARGEST, 2.0)
        assert (shelf.a == 1).all()
    with Shelf(path, mode="r") as shelf:
        assert (shelf.a == 1).all()
        assert shelf.verify() == []


def test_verify_reads_what_a_shelf_that_does_not_verify_has_not(tmp_path: Path) -> None:
    path = tmp_path / "a.shelf"
    with Shelf(path) as shelf:
        shelf.a = np.arange(100.0)
        shelf.n = 1
        shelf.n = 2
    data = bytearray(path.read_bytes())
    data[data.find(np.arange(100.0).tobytes()) + 80] ^= 1
    path.write_bytes(data)
    with Shelf(path, mode="r", verify=False) as shelf:
        _ = shelf.a
        assert [error.name for error in shelf.verify()] == ["a"]


NAMES = st.sampled_from("ab")
NUMBERS = st.integers(0, 2**60)
VALUES = st.one_of(
    st.none(),
    NUMBERS,
    st.tuples(st.sampled_from([0, 3, 700, 700, LARGEST]), NUMBERS).map(
        lambda made: np.full(made[0], made[1], np.uint64)
    ),
    NUMBERS.map(lambda number: {"n": number, "array": np.full(90, number), "none": None}),
    NUMBERS.map(lambda number: str(number) * 100),
)
ABSENT = object()


class RefusalMachine(RuleBasedStateMachine):
    """A shelf beside a dictionary. Its transactions go on after each error that was caught."""

    directory: Path
    medium: str
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        RefusalMachine.runs += 1
        self.path = self.directory / f"{RefusalMachine.runs}.shelf"
        self.shelf = Shelf(self.path, "16MiB", _medium=self.medium)
        self.committed: dict[str, Any] = {}
        self.pending: dict[str, Any] | None = None
        self.transaction: Any = None

    @property
    def model(self) -> dict[str, Any]:
        return self.committed if self.pending is None else self.pending

    @precondition(lambda self: self.pending is None)
    @rule()
    def begin(self) -> None:
        self.transaction = self.shelf.transaction()
        self.transaction.__enter__()
        self.pending = copy.deepcopy(self.committed)

    # --- changes

    @rule(name=NAMES, value=VALUES)
    def assign(self, name: str, value: Any) -> None:
        self.shelf[name] = value
        self.model[name] = copy.deepcopy(value)

    @rule(name=NAMES, number=st.integers(0, 1000), operator=st.booleans())
    def change_in_place(self, name: str, number: int, operator: bool) -> None:
        if self.pending is None:
            with pytest.raises(everystep.errors.TransactionError):
                self.shelf.writable(name)
            self.begin()
        if not isinstance(self.model.get(name), np.ndarray):
            with pytest.raises((TypeError, KeyError)):
                self.shelf.writable(name)
            self.assign(name, np.full(700, number, np.uint64))
        array = self.model[name]
        if operator:
            self.shelf.writable(name)
            self.shelf[name] += np.uint64(number)
            array += np.uint64(number)
        else:
            self.shelf.writable(name)[:1] = number
            array[:1] = number

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(KeyError):
                del self.shelf[name]
        else:
            del self.shelf[name]
            del self.model[name]

    # --- changes that fail

    @rule(name=NAMES, value=st.sampled_from([object(), [object()], np.zeros(1, [("x", int)])]))
    def refuse(self, name: str, value: Any) -> None:
        with pytest.raises(everystep.UnsupportedState):
            self.shelf[name] = value

    @rule(name=NAMES, nth=st.integers(0, 3))
    def fail_to_store(self, name: str, nth: int) -> None:
        """For want of space, or with the device: two blocks and their table are stored by three calls."""
        if nth == 0:
            with pytest.raises(everystep.errors.ShelfFull):
                self.shelf[name] = np.zeros(1 << 21)
        else:
            with pytest.raises(everystep.SaveFailed), faults.injected(f"{STEPS[self.medium]}:{nth}:EIO"):
                self.shelf[name] = np.full(LARGEST, 7, np.uint64)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def nest(self) -> None:
        with pytest.raises(everystep.errors.TransactionError, match="this thread"), self.shelf.transaction():
            pass

    # --- ends

    @precondition(lambda self: self.pending is not None)
    @rule(how=st.sampled_from(["commit", "commit", "roll back", "fail", "close"]), nth=st.integers(1, 8))
    def end(self, how: str, nth: int) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if how == "commit":
            self.transaction.__exit__(None, None, None)
            self.committed = pending
        elif how == "roll back":
            self.transaction.__exit__(InterruptedError, InterruptedError(), None)
        elif how == "close":
            self.shelf.close()
            with pytest.raises(everystep.errors.ShelfClosed):
                self.transaction.__exit__(None, None, None)
            self.shelf = Shelf(self.path, _medium=self.medium)
        else:
            self._fail_to_commit(pending, nth)

    def _fail_to_commit(self, pending: dict[str, Any], nth: int) -> None:
        """Or commit, if fewer calls are enough for it."""
        try:
            with faults.injected(f"any:{nth}:EIO"):
                self.transaction.__exit__(None, None, None)
        except everystep.SaveFailed:
            assert _alike(content(self.shelf), self.committed)
            if self.shelf._opened().failure:
                self.shelf.close()
                self.shelf = Shelf(self.path, _medium=self.medium)
                if not _alike(content(self.shelf), self.committed):  # its root was there when the sync failed
                    self.committed = pending
        else:
            self.committed = pending

    @invariant()
    def holds_what_the_dictionary_holds(self) -> None:
        assert _alike(content(self.shelf), self.model), (content(self.shelf), self.model)
        assert len(self.shelf) == len(self.model)
        assert self.shelf.verify() == []
        with Shelf(self.path, mode="r") as reader:
            assert _alike(content(reader), self.committed), (content(reader), self.committed)
            assert reader.verify() == []

    def teardown(self) -> None:
        self.shelf.close()


def _alike(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("medium", ["page cache", "memory"])
def test_refused_and_failed_changes_against_a_dictionary(memory: Path, medium: str) -> None:
    assert_machine(RefusalMachine, directory=memory, medium=medium, examples=60, steps=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("medium", ["page cache", "memory"])
def test_many_refused_and_failed_changes_against_a_dictionary(memory: Path, medium: str) -> None:
    assert_machine(RefusalMachine, directory=memory, medium=medium, examples=500, steps=40)
