"""Links and pipes in the place of files: nothing is written through them, and no call waits for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Checkpointer, Keep
from everystep.checkpointer.keep import recorded_rules
from everystep.store import step_name

SHARD = "r00000.v0.safetensors"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("do not touch\n")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def train(run: Path, volume: Path | None = None, steps: int = 5) -> None:
    options = None if volume is None else everystep.Options(volumes=[volume])
    with Checkpointer(run, {"w": np.arange(9)}, keep=Keep(last=1), mode="sync", options=options) as ckpt:
        for step in range(1, steps + 1):
            ckpt.save(step)


def a_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def a_link_to_nothing(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("made"))


def a_pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)


Plant = Callable[[Path, Path], None]
PLANTS: list[Plant] = [a_link, a_link_to_nothing, a_pipe]


def untouched(precious: Path) -> bool:
    return precious.read_text() == "do not touch\n" and not precious.with_name("made").exists()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_event_log_is_not_written_through(run: Path, precious: Path, plant: Plant) -> None:
    plant(run / "events.jsonl", precious)
    with pytest.warns(RuntimeWarning, match=r"events are not written to .*events\.jsonl"):
        train(run)
    assert untouched(precious)
    assert everystep.load(run)["w"][3] == 3


@pytest.mark.parametrize("name", [".rules", ".rules.partial"])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_rules_are_not_written_through(run: Path, precious: Path, plant: Plant, name: str) -> None:
    plant(run / name, precious)
    train(run)
    assert untouched(precious)
    assert recorded_rules(str(run)) is not None
    assert everystep.load(run)["w"][3] == 3


@pytest.mark.parametrize("name", [".volumes", ".volumes.partial"])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_ledger_of_volumes_is_not_written_through(
    tmp_path: Path, run: Path, precious: Path, plant: Plant, name: str
) -> None:
    (tmp_path / "volume").mkdir()
    plant(run / name, precious)
    train(run, tmp_path / "volume")
    assert untouched(precious)
    assert everystep.load(run)["w"][3] == 3


def test_nothing_of_the_ledger_is_left_beside_it(tmp_path: Path, run: Path) -> None:
    (tmp_path / "volume").mkdir()
    train(run, tmp_path / "volume")
    assert {name for name in os.listdir(run) if name.startswith(".")} <= {".lock", ".rules", ".volumes"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_lock_is_not_taken_on_what_is_no_file(run: Path, precious: Path, plant: Plant) -> None:
    plant(run / ".lock", precious)
    with pytest.raises(everystep.SaveFailed, match=r"\.lock"):
        train(run)
    assert untouched(precious)
    (run / ".lock").unlink()
    train(run)


@pytest.mark.parametrize("name", [SHARD, "manifest.json", "r00001.json"])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_in_a_leftover_or_a_spare_is_not_written_through(
    run: Path, precious: Path, plant: Plant, name: str
) -> None:
    for leftover in (f"{step_name(1)}.partial", f"{step_name(9)}.retired"):
        (run / leftover).mkdir()
        plant(run / leftover / name, precious)
    state = {"w": np.zeros(300_000)}
    with Checkpointer(run, state, keep=Keep(last=1), mode="sync") as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step)
        for spare in run.glob("*.retired"):
            (spare / name).unlink(missing_ok=True)
            plant(spare / name, precious)
        for step in range(4, 8):
            state["w"][:] = step
            checkpointer.save(step)
            assert everystep.load(run)["w"][-1] == step
    assert untouched(precious)


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
@pytest.mark.parametrize("size", [9, 300_000], ids=["small", "large"])
def test_a_pipe_in_a_checkpoint_is_damage_and_not_waited_for(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / "c"
    everystep.save(path, {"w": np.arange(size)})
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(everystep.CorruptCheckpoint, match="not a regular file"):
        everystep.load(path)
    assert not everystep.verify(path).intact
