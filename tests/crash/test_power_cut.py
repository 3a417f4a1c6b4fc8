"""A power cut at any moment: what was reported durable comes back, and never wrong bytes.

`power_cuts` says what a file system may lose, `save_sequences` what a training does, `recovery` what must
hold. How many states were tried is printed at the end of the test run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import everystep
from crash.conftest import USABLE, WAYS
from everystep.engine import faults
from support.crashes import save_sequences as sequences
from support.crashes.crash_surveys import survey_failing, survey_killed, survey_recoveries
from support.crashes.crash_tracing import Recording, Survey, Tally
from support.crashes.power_cuts import Budget, Disk
from support.crashes.recovery import PathRecovery, RunRecovery

Sequence = Callable[[Path, everystep.Options], Recording]
Report = Callable[[Tally], None]

SEQUENCES = [sequences.steady, sequences.same_steps_again, sequences.after_damage]
WINDOWED = WAYS[USABLE[0]]
SMALL = WAYS["small"]
NAMES_ONLY = Budget(names=64, torn=1, single=False)


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize("sequence", SEQUENCES, ids=_name)
def test_power_cut_in_a_run(tmp_path: Path, ram: Path, sequence: Sequence, tried: Report) -> None:
    # Sectors one by one in two of them: what the third adds is in the names.
    budget = Budget(single=sequence is not sequences.after_damage)
    tally = Survey(ram, RunRecovery(), budget)(sequence(tmp_path, WINDOWED))
    tried(tally)
    assert tally.states > 250


@pytest.mark.parametrize("way", [USABLE[0], "small"])
def test_power_cut_after_going_back(tmp_path: Path, ram: Path, way: str, tried: Report) -> None:
    tally = Survey(ram, RunRecovery(), NAMES_ONLY)(sequences.going_back(tmp_path, WAYS[way]))
    tried(tally)
    assert tally.states > 30


@pytest.mark.usefixtures("spare_now")
@pytest.mark.parametrize("sequence", SEQUENCES, ids=_name)
def test_power_cut_in_a_run_that_recycles_at_once(
    tmp_path: Path, ram: Path, sequence: Sequence, tried: Report
) -> None:
    tally = Survey(ram, RunRecovery(), NAMES_ONLY)(sequence(tmp_path, WINDOWED))
    tried(tally)
    assert tally.states > 50


def test_power_cut_in_a_run_of_small_states(tmp_path: Path, ram: Path, tried: Report) -> None:
    tally = Survey(ram, RunRecovery(), Budget(names=64))(sequences.steady(tmp_path, SMALL))
    tried(tally)
    assert tally.states > 100


@pytest.mark.parametrize("way", [USABLE[0], "small"])
def test_power_cut_while_a_path_is_replaced(tmp_path: Path, ram: Path, way: str, tried: Report) -> None:
    tally = Survey(ram, PathRecovery())(sequences.replaced_path(tmp_path, WAYS[way]))
    tried(tally)
    assert tally.states > 200


def test_power_cut_after_a_save_that_made_the_directories_above(tmp_path: Path) -> None:
    """Every name on the way is durable with the checkpoint: here it is not lost in any state."""
    with faults.traced() as events:
        everystep.save(tmp_path / "a" / "b" / "c", {"w": 1})
    disk = Disk(tmp_path)
    for event in events:
        if Path(event.path).is_relative_to(tmp_path):  # names further up are there already
            disk.replay(event)
    images = list(disk.crashes(Budget(), random.Random(0)))
    assert images
    assert all("a/b/c/r00000.v0.safetensors" in image.tree for image in images)


def test_power_cut_among_many_windows(tmp_path: Path, ram: Path, tried: Report) -> None:
    """A state of several transfers, of which any part may be there."""
    wide = 50_000
    options = everystep.Options(backend=WINDOWED.backend, memory_nbytes=128 << 10, small_nbytes=0)
    recording = sequences.steady(tmp_path, options, saves=3, wide=wide)
    shard_writes = [
        item
        for item in recording.items
        if isinstance(item, faults.TracedCall) and item.call == "write" and item.offset
    ]
    assert len(shard_writes) >= 3 * 2
    tally = Survey(ram, RunRecovery(wide=wide), Budget(names=8, torn=4, single=False))(recording)
    tried(tally)
    assert tally.states > 100


def test_power_cut_after_a_failed_save(tmp_path: Path, ram: Path, tried: Report) -> None:
    tally = survey_failing(tmp_path, ram, WINDOWED)
    tried(tally)
    assert tally.states > 500


@pytest.mark.usefixtures("spare_now")
def test_power_cut_after_a_failed_save_of_a_run_that_recycles_at_once(
    tmp_path: Path, ram: Path, tried: Report
) -> None:
    tally = survey_failing(tmp_path, ram, SMALL)
    tried(tally)
    assert tally.states > 100


def test_power_cut_after_a_killed_process_was_restarted(tmp_path: Path, ram: Path, tried: Report) -> None:
    """SIGKILL leaves the page cache: the next process works on names and bytes that are not durable yet."""
    tally = survey_killed(tmp_path, ram, WINDOWED)
    tried(tally)
    assert tally.states > 500


def test_power_cut_in_the_recovery_from_a_power_cut(tmp_path: Path, ram: Path, tried: Report) -> None:
    tally = survey_recoveries(tmp_path, ram, WINDOWED, sample=15)
    tried(tally)
    assert tally.states > 100


def test_every_backend_makes_the_same_operations(tmp_path: Path) -> None:
    """So what holds for the operations of one of them holds for all."""
    made = {}
    for backend in USABLE:
        root = tmp_path / backend
        root.mkdir()
        items = sequences.same_steps_again(root, WAYS[backend]).items
        made[backend] = [
            (
                item.call,
                *(path.removeprefix(str(root)) for path in (item.path, item.path2)),
                item.offset,
                item.nbytes,
            )
            if isinstance(item, faults.TracedCall)
            else item
            for item in items
        ]
    for backend in USABLE:
        assert made[backend] == made[USABLE[0]]


@pytest.mark.crash_large
@pytest.mark.parametrize("spare", ["later", "now"])
@pytest.mark.parametrize("sequence", SEQUENCES, ids=_name)
@pytest.mark.timeout(3600)
def test_power_cut_in_every_way(
    tmp_path: Path,
    ram: Path,
    way: everystep.Options,
    sequence: Sequence,
    spare: str,
    tried: Report,
    request: pytest.FixtureRequest,
) -> None:
    if spare == "now":
        request.getfixturevalue("spare_now")
    recording = sequence(tmp_path, way)
    for seed in range(3):
        survey = Survey(ram, RunRecovery(), Budget(names=512, torn=20), seed, thorough_every=5)
        tally = survey(recording)
        tried(tally)
        assert tally.states > 250


@pytest.mark.crash_large
@pytest.mark.parametrize("spare", ["later", "now"])
@pytest.mark.timeout(3600)
def test_power_cut_in_the_second_life_in_every_way(
    tmp_path: Path,
    ram: Path,
    way: everystep.Options,
    spare: str,
    tried: Report,
    request: pytest.FixtureRequest,
) -> None:
    if spare == "now":
        request.getfixturevalue("spare_now")
    for name in ("failing", "killed", "recoveries"):
        (tmp_path / name).mkdir()
    for tally in (
        survey_failing(tmp_path / "failing", ram, way),
        survey_killed(tmp_path / "killed", ram, way),
        survey_recoveries(tmp_path / "recoveries", ram, way, sample=150),
    ):
        tried(tally)
        assert tally.states > 100
