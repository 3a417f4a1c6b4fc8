"""After any crash: the last committed transaction, or the one in flight, complete; never a mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from everystep.engine import faults
from support.shelves import shelf_schemes
from support.shelves.machines import assert_machine
from support.shelves.shelf_crashes import PAGE, WORD, Disk, Timeline, merged, survey
from support.shelves.shelf_schemes import (
    UNITS,
    Change,
    ShelfRecorder,
    ShelfRecovery,
    content_of,
    history,
    shelf_outcome,
)


def _event(call: str, offset: int = 0, data: bytes = b"", nbytes: int = 0) -> faults.TracedCall:
    return faults.TracedCall(call, "f", "", offset, nbytes or len(data), data, False)


def test_the_model_knows_any_subset_of_pages_until_a_sync() -> None:
    disk = Disk(PAGE, bytes(2 * PAGE))
    for event in (_event("write", 0, b"a" * PAGE), _event("write", PAGE, b"b"), _event("write", 0, b"c")):
        disk.apply(event)
    found = {state[:1] + state[PAGE : PAGE + 1] for state in disk.states(100, np.random)}  # type: ignore[arg-type]
    assert found == {a + b for a in (b"\0", b"a", b"c") for b in (b"\0", b"b")}
    disk.apply(_event("sync"))
    assert list(disk.states(100, np.random)) == [disk.newest()]  # type: ignore[arg-type]


def test_the_model_tears_stores_at_words_until_they_are_written_back_and_fenced() -> None:
    disk = Disk(WORD, bytes(16))
    disk.apply(_event("store", 0, b"a" * 8 + b"b" * 8))
    disk.apply(_event("fence"))  # without a write-back, it says nothing
    assert len(set(disk.states(100, np.random))) == 4  # type: ignore[arg-type]
    disk.apply(_event("write_back", 0, nbytes=8))
    assert len(set(disk.states(100, np.random))) == 4  # type: ignore[arg-type]
    disk.apply(_event("fence"))
    assert {state[:8] for state in disk.states(100, np.random)} == {b"a" * 8}  # type: ignore[arg-type]


@pytest.mark.parametrize("medium", UNITS)
def test_a_crash_leaves_the_last_transaction_or_the_one_in_flight(memory: Path, medium: str) -> None:
    outcome = merged(
        shelf_outcome(memory, medium, seed, transactions=6, per_point=6, largest=300) for seed in range(3)
    )
    assert outcome.torn == 0, outcome.examples
    assert outcome.states > 300
    assert outcome.latest > 0
    assert outcome.previous > 0


def test_transactions_that_are_synced_in_two_steps_hold_as_well(memory: Path) -> None:
    outcome = shelf_outcome(memory, "page cache", 5, transactions=4, per_point=3, largest=120_000)
    assert outcome.torn == 0, outcome.examples


@pytest.mark.crash_large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("medium", UNITS)
def test_thousands_of_crash_states(memory: Path, medium: str) -> None:
    outcomes = [shelf_outcome(memory, medium, seed, transactions=12, per_point=24) for seed in range(20)]
    assert merged(outcomes).torn == 0, [outcome.examples for outcome in outcomes if outcome.torn]
    assert merged(outcomes).states > 10_000


@pytest.mark.parametrize(
    ("medium", "dropped"),
    [("page cache", "sync"), ("persistent memory", "fence"), ("persistent memory", "write_back")],
)
def test_the_harness_finds_a_shelf_that_forgets_to_order_its_stores(
    memory: Path, medium: str, dropped: str
) -> None:
    recorder = ShelfRecorder(memory / "a.shelf", medium)
    for change in history(1, 6, largest=60):
        recorder.commit(change)
    recorder.close()
    careless = Timeline(recorder.timeline.image)
    for stretch in recorder.timeline.stretches:
        stretch.events = [event for event in stretch.events if event.call != dropped]
        careless.stretches.append(stretch)
    last = sum(len(stretch.events) for stretch in careless.stretches) - 6
    outcome = survey(
        careless, ShelfRecovery(memory), unit=UNITS[medium], per_point=12, points=lambda point: point > last
    )
    assert outcome.torn > 0


@pytest.mark.parametrize("medium", UNITS)
def test_the_harness_finds_in_place_changes_with_dirty_marks_torn(medium: str) -> None:
    outcome = shelf_schemes.in_place_outcome(medium, 1, transactions=8, per_point=8)
    assert outcome.noticed > 0
    assert outcome.unnoticed > 0


def test_the_harness_finds_savez_torn() -> None:
    assert shelf_schemes.savez_outcome(1, transactions=6, per_point=8, rename=False).noticed > 0
    assert shelf_schemes.savez_outcome(1, transactions=6, per_point=8, rename=True).noticed > 0


NAMES = st.sampled_from("abcde")
VALUES = st.one_of(
    st.none(),
    st.integers(0, 2**60),
    st.tuples(st.integers(0, 400), st.floats(allow_nan=False)).map(lambda made: np.full(made[0], made[1])),
)
CHANGES = st.dictionaries(NAMES, VALUES, min_size=1, max_size=4)


class ShelfMachine(RuleBasedStateMachine):
    """A shelf against a dictionary; in the end, crashes all over its history."""

    directory: Path
    medium: str
    per_point = 2
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        ShelfMachine.runs += 1
        self.recorder = ShelfRecorder(self.directory / f"{ShelfMachine.runs}.shelf", self.medium)
        self.kept: list[tuple[np.ndarray, bytes]] = []

    @rule(change=CHANGES, in_place=st.booleans())
    def commit(self, change: Change, in_place: bool) -> None:
        self.recorder.commit(change, in_place=in_place)

    @rule(change=CHANGES)
    def roll_back(self, change: Change) -> None:
        self.recorder.roll_back(change)

    @rule()
    def reopen(self) -> None:
        self.recorder.reopen()

    @rule(number=st.integers(0, 2**60))
    def fail(self, number: int) -> None:
        self.recorder.fail_to_sync({"a": number})

    @precondition(lambda self: self.recorder.content)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        array = self.recorder.shelf[data.draw(st.sampled_from(sorted(self.recorder.content)))]
        if isinstance(array, np.ndarray):
            self.kept.append((array, array.tobytes()))

    @invariant()
    def holds_what_was_committed(self) -> None:
        assert content_of(self.recorder.shelf) == self.recorder.content
        for array, data in self.kept:
            assert array.tobytes() == data

    def teardown(self) -> None:
        self.recorder.close()
        if len(self.recorder.timeline.stretches) > 2:
            recover = ShelfRecovery(self.directory)
            unit = UNITS[self.medium]
            outcome = survey(self.recorder.timeline, recover, unit=unit, per_point=self.per_point)
            assert outcome.torn == 0, outcome.examples


@pytest.mark.parametrize("medium", UNITS)
def test_random_histories_against_a_dictionary(memory: Path, medium: str) -> None:
    assert_machine(ShelfMachine, directory=memory, medium=medium, examples=5, steps=8, per_point=2)


@pytest.mark.crash_large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("medium", UNITS)
def test_many_random_histories_against_a_dictionary(memory: Path, medium: str) -> None:
    assert_machine(ShelfMachine, directory=memory, medium=medium, examples=60, steps=20, per_point=8)
