"""`verify` beside a training: retention takes checkpoints away while they are read."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import inspect
from everystep.engine import Tuning
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.store import verify
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint
from support.processes.command import damage_leaf
from support.worlds.several_ranks import write_several

STATE = {"w": np.arange(3000), "b": np.ones(7)}


def renamed(path: Path) -> None:
    path.rename(path.with_name(path.name + ".retired"))


def removed(path: Path) -> None:
    renamed(path)
    shutil.rmtree(path.with_name(path.name + ".retired"))


@pytest.fixture(params=[renamed, removed])
def taken_once_open(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention takes a checkpoint away as soon as it was opened."""
    take: Callable[[Path], None] = request.param

    def open_and_take(path: str, tuning: Tuning) -> Checkpoint:
        opened = open_checkpoint(path, tuning)
        take(Path(path))
        return opened

    monkeypatch.setattr("everystep.store.read.verify.open_checkpoint", open_and_take)


@pytest.mark.usefixtures("taken_once_open")
@pytest.mark.parametrize("small_nbytes", [0, 1 << 20], ids=["two files", "one file"])
def test_a_checkpoint_that_retention_takes_while_it_is_read_is_verified(
    small_nbytes: int, tmp_path: Path
) -> None:
    options = everystep.Options(small_nbytes=small_nbytes)
    everystep.save(tmp_path / "there", STATE, options=options)
    everystep.save(tmp_path / "taken", STATE, options=options)
    reports = [verify(tmp_path / "taken")]
    assert [(report.intact, report.leaves, report.strangers) for report in reports] == [(True, 2, ())]
    damage = tmp_path / "damaged"
    everystep.save(damage, STATE)
    damage_leaf(damage, "w")
    assert [problem.leaf for problem in verify(damage).problems] == ["w"]


@pytest.mark.usefixtures("taken_once_open")
def test_a_damaged_part_of_a_checkpoint_that_retention_takes_is_reported(tmp_path: Path) -> None:
    placement = MeshPlacement(Mesh.grid(3), (Split(0, 0),))
    plan = WritePlan([LeafLayout("w", "I64", (3000,), (placement,), "numpy")], Topology.regular(3))
    write_several(tmp_path / "several", plan, {"w": STATE["w"]})
    part = tmp_path / "several" / "r00001.json"
    part.write_bytes(part.read_bytes()[:-1])
    report = verify(tmp_path / "several")
    assert [Path(problem.file).name for problem in report.problems] == ["r00001.json"]
    assert report.strangers == ()


def test_verify_beside_a_training_reports_only_whole_checkpoints(tmp_path: Path) -> None:
    run, done, saves = tmp_path / "run", threading.Event(), itertools.count(1)

    def train() -> None:
        state = {"w": np.zeros(3000)}
        with everystep.Checkpointer(run, state, mode="sync", keep=everystep.Keep(last=1)) as ckpt:
            while not done.is_set():
                state["w"] += 1
                ckpt.save(next(saves))

    everystep.Checkpointer(run, STATE).close()
    training = threading.Thread(target=train)
    training.start()
    try:
        verified = 0
        while verified < 60 and training.is_alive():
            reports = inspect.verify_all(run) if inspect.list_run(run).checkpoints else ()
            verified += len(reports)
            assert [report.problems for report in reports if not report.intact] == []
    finally:
        done.set()
        training.join()
    assert verified >= 60
