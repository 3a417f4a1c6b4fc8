"""Protocols with a step left out or out of order are caught. Were they not, surveys would prove nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everystep
from crash.conftest import USABLE, WAYS
from everystep.engine import fs
from everystep.engine.fs import Entry, OpenDirectory
from everystep.store.commit.transaction import Transaction
from everystep.store.names import PARTIAL
from support.crashes import save_sequences as sequences
from support.crashes.crash_surveys import survey_killed
from support.crashes.crash_tracing import Recording, Survey
from support.crashes.power_cuts import Budget
from support.crashes.recovery import Lost, PathRecovery, Recovery, RunRecovery
from support.states.identified_states import WrongBytes

WINDOWED = WAYS[USABLE[0]]
CAUGHT = (Lost, WrongBytes)

Plant = Callable[[pytest.MonkeyPatch], None]


def catches(recovery: Recovery, recording: Recording, scratch: Path) -> None:
    with pytest.raises(CAUGHT):
        Survey(scratch, recovery, Budget(names=64, torn=2))(recording)


# --- syncs that are missing -----------------------------------------------------------------------


def no_sync_of_the_shard(patch: pytest.MonkeyPatch) -> None:
    real = fs.sync
    patch.setattr(fs, "sync", lambda written, directory=None: real(written[1:], directory))


def no_sync_of_the_manifest(patch: pytest.MonkeyPatch) -> None:
    real = fs.sync
    patch.setattr(fs, "sync", lambda written, directory=None: real(written[:1], directory))


def no_sync_of_the_checkpoint_directory(patch: pytest.MonkeyPatch) -> None:
    real = fs.sync
    patch.setattr(fs, "sync", lambda written, directory=None: real(written))


def no_sync_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "everystep.store.commit.transaction.fs",
        SimpleNamespace(**{**vars(fs), "sync_dir": lambda path: None}),
    )


@pytest.mark.parametrize(
    "plant",
    [
        no_sync_of_the_shard,
        no_sync_of_the_manifest,
        no_sync_of_the_checkpoint_directory,
        no_sync_of_the_parent,
    ],
    ids=lambda plant: plant.__name__,
)
@pytest.mark.parametrize("way", [USABLE[0], "small"])
@pytest.mark.parametrize("kind", ["run", "path"])
def test_a_missing_sync_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, way: str, kind: str
) -> None:
    if way == "small" and plant is no_sync_of_the_manifest:
        pytest.skip("there is one file: the bug is that of the shard")
    plant(monkeypatch)
    sequence = sequences.steady if kind == "run" else sequences.replaced_path
    recording = sequence(tmp_path, WAYS[way])
    monkeypatch.undo()
    catches(RunRecovery() if kind == "run" else PathRecovery(), recording, ram)


@pytest.mark.usefixtures("spare_now")
def test_recycling_before_the_retirement_is_durable_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost rename would show a retired step with the bytes of the one that was written over it."""
    without = SimpleNamespace(**{**vars(fs), "sync_dir": lambda path: None})
    monkeypatch.setattr("everystep.store.run.fs", without)
    recording = sequences.steady(tmp_path, WINDOWED)
    monkeypatch.undo()
    catches(RunRecovery(), recording, ram)


# --- steps in the wrong order ---------------------------------------------------------------------


def commit_before_sync(patch: pytest.MonkeyPatch) -> None:
    """The rename first; everything is synced before the save is reported all the same."""
    real_sync, real_sync_dir = fs.sync, fs.sync_dir
    deferred: list[tuple[Sequence[Any], OpenDirectory | None]] = []

    def sync_dir(parent: OpenDirectory) -> None:
        while deferred:
            written, directory = deferred.pop()
            real_sync(written, directory and directory.path.removesuffix(PARTIAL))
        real_sync_dir(parent)

    real_write = fs.write_file
    # The end of its `with` block must not close a file that is yet to be synced.
    patch.setattr(fs, "write_file", lambda *args, **more: contextlib.nullcontext(real_write(*args, **more)))
    patch.setattr(fs, "sync", lambda written, directory: deferred.append((written, directory)))
    patch.setattr(fs, "sync_dir", sync_dir)


def remove_before_rename(patch: pytest.MonkeyPatch) -> None:
    """Replacing without an exchange: for a moment there is neither."""

    def exchange(new: Entry, old: Entry) -> None:
        fs.remove_tree(old)
        fs.rename(new, old)

    patch.setattr(fs, "exchange", exchange)


@pytest.mark.parametrize(
    "plant", [commit_before_sync, remove_before_rename], ids=lambda plant: plant.__name__
)
@pytest.mark.parametrize("kind", ["run", "path"])
def test_a_wrong_order_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, kind: str
) -> None:
    plant(monkeypatch)
    sequence = sequences.same_steps_again if kind == "run" else sequences.replaced_path
    recording = sequence(tmp_path, WINDOWED)
    monkeypatch.undo()
    catches(RunRecovery() if kind == "run" else PathRecovery(), recording, ram)


# --- failures that are taken lightly --------------------------------------------------------------


def test_a_failed_sync_that_is_ignored_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fs.sync_dir

    def sync_dir(directory: OpenDirectory) -> None:
        try:
            real(directory)
        except OSError:
            return

    monkeypatch.setattr(fs, "sync_dir", sync_dir)
    recording = sequences.with_failing_call(tmp_path, WINDOWED, "sync_dir:2:EIO")
    monkeypatch.undo()
    catches(RunRecovery(), recording, ram)


def test_cleaning_up_while_the_names_are_uncertain_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync the exchange may be on the disk and its reversal not."""

    def publish(partial: Transaction, replaced: object = None) -> None:
        replaces = partial.overwrite and fs.exists(partial.target_entry)
        move = fs.exchange if replaces else fs.rename
        move(partial.entry, partial.target_entry)
        try:
            fs.sync_dir(partial.parent)
        except OSError:
            move(partial.target_entry, partial.entry)
            raise
        if replaces:
            fs.remove_tree(partial.entry)

    monkeypatch.setattr(Transaction, "publish", publish)
    recording = sequences.with_failing_call(tmp_path, WINDOWED, "sync_dir:2:EIO")
    monkeypatch.undo()
    catches(RunRecovery(), recording, ram)


def test_sweeping_before_the_names_are_durable_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = SimpleNamespace(**{**vars(fs), "sync_dir": lambda path: None})
    monkeypatch.setattr("everystep.store.run.fs", without)
    with pytest.raises(CAUGHT):
        survey_killed(tmp_path, ram, WINDOWED)


def test_a_run_whose_own_name_is_not_durable_is_caught(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "anchor", lambda directory, once=False: None)
    recording = sequences.steady(tmp_path, WINDOWED, saves=1)
    monkeypatch.undo()
    catches(RunRecovery(), recording, ram)


def test_without_a_planted_bug_nothing_is_caught(tmp_path: Path, ram: Path) -> None:
    """The same surveys as above: what they catch is the bug."""
    (tmp_path / "run").mkdir()
    (tmp_path / "path").mkdir()
    budget = Budget(names=64, torn=2)
    steady = sequences.steady(tmp_path / "run", everystep.Options(), saves=3)
    replaced = sequences.replaced_path(tmp_path / "path", everystep.Options())
    assert Survey(ram, RunRecovery(), budget)(steady).states > 50
    assert Survey(ram, PathRecovery(), budget)(replaced).states > 50
