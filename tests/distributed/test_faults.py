"""A rank is killed at any point of a save: all or nothing is committed, no rank hangs, and others resume.

Killed at every call of the file system that a rank makes in a save, and before and after each message it
sends. Several worlds are at it at the same time: most of their time they wait for a rank that is dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from support.worlds.disturbed_trainings import Course, Kill, Mode, check_alone, durable, leftovers, train
from support.worlds.launcher import Outcome, StoreHost, launch, started, values

pytestmark = pytest.mark.race

Record = Callable[[str, object], None]

WORLD = 3
SILENCE_SECONDS = 2.0
"""How long survivors wait for the dead, once they are."""
ARMED = 4
"""The save in which a rank is killed: two checkpoints are there, one of which it will retire, and a spare."""
AT_ONCE = 7

POSTS = {
    0: (CALL := "/told/1", PLAN := "/told/2", OPENED := "/told/3", END := "/told/4"),
    1: ("/said/1/1", "/said/2/1"),
    2: ("at/2", "/said/1/2", WRITTEN_BY_2 := "/said/2/2"),
}
"""What each rank says in a save. The coordinator tells; others say that they are ready, and have written."""


def disturbed(run: Path, mode: Mode, kill: Kill) -> Course:
    return Course(run, ARMED + 2, mode, SILENCE_SECONDS, ARMED, kill)


def count_calls(root: Path, mode: Mode) -> dict[int, int]:
    """How many calls of the file system each rank makes in the armed save, if nothing happens."""
    counts: dict[int, int] = {}
    for rank in range(WORLD):
        course = Course(root / f"undisturbed-{rank}", ARMED, mode, armed=ARMED, kill=Kill(rank))
        found = values(launch(WORLD, train, course))
        counts[rank] = found[rank]["calls"]
    return counts


def kill_all(root: Path, mode: Mode, kills: Sequence[Kill], store: StoreHost = "agent") -> list[Path]:
    """Each kill in a world of its own, and what must hold after each; the runs that they leave."""
    runs: list[Path] = []
    for at in range(0, len(kills), AT_ONCE):
        some = [
            (kill, root / f"{mode}-{store}-{at + number}") for number, kill in enumerate(kills[at:][:AT_ONCE])
        ]
        with contextlib.ExitStack() as stack:
            worlds = [
                stack.enter_context(started(WORLD, train, disturbed(run, mode, kill), store=store))
                for kill, run in some
            ]
            ends = [world.join() for world in worlds]
        for (kill, run), outcomes in zip(some, ends, strict=True):
            check_survivors(kill, outcomes)
            runs.append(run)
    return runs


def check_survivors(kill: Kill, outcomes: Sequence[Outcome]) -> None:
    told = "\n\n".join([str(kill), *(outcome.describe() for outcome in outcomes)])
    assert outcomes[kill.rank].exitcode == -signal.SIGKILL, told
    for outcome in outcomes:
        if outcome.rank != kill.rank:
            assert not outcome.timed_out, told
            assert outcome.error in ("SaveTimedOut", "SaveFailedOnRank", "RankTimeout"), told


def kills_by_call(counts: dict[int, int], stride: int) -> list[Kill]:
    return [
        Kill(rank, f"any:{nth}:kill")
        for rank, count in counts.items()
        for nth in range(1 + rank % stride, count + 1, stride)
    ]


def kills_by_message(ranks: Sequence[int]) -> list[Kill]:
    return [
        Kill(rank, post=post, sent=sent) for rank in ranks for post in POSTS[rank] for sent in (False, True)
    ]


def test_one_rank_killed_at_calls_of_a_save(tmp_path: Path, record_property: Record) -> None:
    """The coordinator and a follower, in phases that differ; then fewer ranks, and more, go on."""
    counts = count_calls(tmp_path, "overlap")
    assert counts[0] > 10
    assert min(counts.values()) >= 4
    kills = kills_by_call({0: counts[0], 1: counts[1]}, 3)
    runs = kill_all(tmp_path, "overlap", kills)
    record_property("crash-kills", len(runs))
    for run, world in zip(runs[-2:], (2, 4), strict=True):
        before = durable(run)
        found = values(launch(world, train, Course(run, ARMED + 3, "overlap")))
        assert {value["resumed"] for value in found} <= set(range(max(before, ARMED - 1), ARMED + 1))
        assert all(value["exact"] for value in found)
        assert leftovers(run) == []
    for run in runs[:-2]:
        assert check_alone(run, ARMED) >= ARMED - 1


def test_one_rank_killed_at_messages_of_a_save(tmp_path: Path, record_property: Record) -> None:
    kills = [*kills_by_message([0])[2:], Kill(1, post="/said/1/1"), Kill(2, post=WRITTEN_BY_2, sent=True)]
    runs = kill_all(tmp_path, "sync", kills)
    record_property("crash-kills", len(runs))
    ends = [check_alone(run, ARMED) for run in runs]
    committed = [kill.post in (END, WRITTEN_BY_2) for kill in kills]
    assert ends == [ARMED if end else ARMED - 1 for end in committed]


def test_the_store_dies_with_the_coordinator(tmp_path: Path, record_property: Record) -> None:
    kills = [Kill(0, "any:3:kill"), Kill(0, post=END), Kill(0, post=END, sent=True)]
    runs = kill_all(tmp_path, "overlap", kills, "rank0")
    record_property("crash-kills", len(runs))
    assert [check_alone(run, ARMED) for run in runs] == [ARMED - 1, ARMED, ARMED]


@pytest.fixture(params=["sync", "overlap"])
def mode(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.crash_large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["agent", "rank0"])
def test_each_rank_killed_at_each_call_and_message(
    tmp_path: Path, mode: Mode, store: StoreHost, record_property: Record
) -> None:
    kills = [*kills_by_call(count_calls(tmp_path, mode), 1), *kills_by_message(range(WORLD))]
    runs = kill_all(tmp_path, mode, kills, store)
    record_property("crash-kills", len(runs))
    for run in runs:
        assert check_alone(run, ARMED) >= ARMED - 1


def _another_world_meanwhile(folder: Path) -> list[str]:
    """Between hearing where to write and opening it, rank 1 is so late that another process has that name."""
    import torch.distributed as dist

    from everystep.engine import fs
    from everystep.store.commit import driver

    path = folder / "model"
    real = driver.open_partial

    def late(directory: str) -> Any:
        os.mkdir(f"{directory}.other")
        fs.exchange(f"{directory}.other", directory)
        return real(directory)

    if dist.get_rank() == 1:
        driver.open_partial = late
    with pytest.raises(everystep.EverystepError, match="abandoned" if dist.get_rank() == 1 else ""):
        everystep.save(path, {"w": np.arange(5000.0)}, timeout=30.0)
    return [found.name for found in folder.glob("model.partial/r00001*")]


def test_a_rank_that_is_late_does_not_write_into_what_another_world_has_made(tmp_path: Path) -> None:
    assert values(launch(2, _another_world_meanwhile, tmp_path)) == [[], []]
