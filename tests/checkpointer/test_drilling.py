"""Under a drill a Checkpointer works elsewhere and keeps a diary; without one, nothing of it exists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import everystep
from everystep.checkpointer import drilling
from everystep.checkpointer.drilling import Drill, Kill, Mark, Observed, contents_of, relocate
from everystep.checkpointer.run_observer import Durable
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.store.read.checkpoint import open_newest
from support.worlds.several_ranks import Own, write_several

TRAIN = """
import sys
import numpy
import everystep

state = {"w": numpy.zeros(100)}
with everystep.Checkpointer(sys.argv[1], state, mode="sync") as ckpt:
    for step in range(ckpt.restore(), 5):
        state["w"] += 1
        ckpt.save(step + 1)
"""


def marks(drill: Path) -> list[Mark]:
    lines = (drill / drilling.DIARY).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Mark) for line in lines]


def told(drill: Path) -> list[tuple[str, int | None]]:
    return [(mark.what, mark.step) for mark in marks(drill)]


def train(tmp_path: Path, kill: str | None = None) -> int:
    """Five steps in a process of their own; its exit code."""
    environment = {**os.environ, drilling.DIRECTORY: str(tmp_path / "drill")}
    if kill is not None:
        environment[drilling.KILL] = kill
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "run")]
    return subprocess.run(command, env=environment, timeout=240, check=False).returncode


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(drilling.DIRECTORY, str(tmp_path / "drill"))
    return tmp_path / "drill"


def test_without_a_drill_there_is_none(tmp_path: Path) -> None:
    assert drilling.join(str(tmp_path / "run")) is None
    assert list(tmp_path.iterdir()) == []


def test_without_a_drill_a_run_is_where_the_script_says(tmp_path: Path) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"n": 1}, mode="sync") as ckpt:
        ckpt.save(1)
    assert ckpt.path == str(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_under_drill_leaves_the_real_one_alone(tmp_path: Path, drill: Path) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"n": 1}, mode="sync") as ckpt:
        ckpt.save(1)
    assert ckpt.path == relocate(str(drill), str(tmp_path / "run"))
    assert Path(ckpt.path).is_relative_to(drill)
    assert not (tmp_path / "run").exists()


def test_the_same_path_is_the_same_run_and_another_path_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    once = relocate("d", str(tmp_path / "a" / "run"))
    assert relocate("d", "a/run") == once
    assert relocate("d", "b/run") != once
    assert Path(once).name.startswith("run-")


@pytest.mark.usefixtures("drill")
def test_the_diary_tells_of_steps_saves_and_restores_in_order(tmp_path: Path, drill: Path) -> None:
    state = {"w": np.zeros(10)}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync", every=2) as ckpt:
        assert ckpt.restore() == 0
        for step in range(1, 5):
            state["w"] += 1
            ckpt.save(step)
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync", every=2) as ckpt:
        assert ckpt.restore() == 4
    assert told(drill) == [
        ("opened", None),
        ("restoring", None),
        ("restored", 0),
        ("completed", 1),
        ("completed", 2),
        ("saving", 2),
        ("durable", 2),
        ("completed", 3),
        ("completed", 4),
        ("saving", 4),
        ("durable", 4),
        ("opened", None),
        ("restoring", None),
        ("restored", 4),
    ]
    found = marks(drill)
    assert {mark.pid for mark in found} == {os.getpid()}
    assert [mark.at for mark in found] == sorted(mark.at for mark in found)
    digests = {(mark.what, mark.step): mark.digest for mark in found}
    assert digests["durable", 4] == digests["restored", 4] != digests["durable", 2]


@pytest.mark.usefixtures("drill")
def test_a_save_that_fails_is_in_the_diary(tmp_path: Path, drill: Path) -> None:
    from everystep.engine import faults

    with everystep.Checkpointer(tmp_path / "run", {"n": 1}, mode="sync") as ckpt:
        with faults.injected("sync:1:EIO"), pytest.raises(everystep.SaveFailed):
            ckpt.save(1)
        ckpt.save(2)
    assert [what for what, step in told(drill) if step in (1, 2)] == [
        "completed",
        "saving",
        "failed",
        "completed",
        "saving",
        "durable",
    ]


def test_a_save_that_cannot_even_begin_is_in_the_diary(tmp_path: Path, drill: Path) -> None:
    ckpt = everystep.Checkpointer(tmp_path / "run", {"x": object()}, mode="sync")
    with ckpt, pytest.raises(everystep.UnsupportedState):
        ckpt.save(1)
    assert told(drill)[-3:] == [("completed", 1), ("saving", 1), ("failed", 1)]


@pytest.mark.usefixtures("drill")
def test_a_drill_writes_nothing_to_the_volumes_of_the_real_run(tmp_path: Path) -> None:
    volumes = [tmp_path / "ssd0", tmp_path / "ssd1"]
    for volume in volumes:
        volume.mkdir()
    options = everystep.Options(volumes=volumes)
    with everystep.Checkpointer(tmp_path / "run", {"w": np.ones(9)}, mode="sync", options=options) as ckpt:
        ckpt.save(1)
        assert everystep.verify(ckpt.path).intact
    assert [list(volume.iterdir()) for volume in volumes] == [[], []]


def contents(tmp_path: Path, state: object) -> drilling.Contents:
    everystep.save(tmp_path / "checkpoint", state, overwrite=True)
    with open_newest(tmp_path / "checkpoint") as opened:
        return contents_of(opened)


def test_contents_see_one_bit_of_one_leaf_and_one_value(tmp_path: Path) -> None:
    w = np.arange(5000.0)
    state: dict[str, Any] = {"w": w, "b": np.zeros(3), "lr": 0.1, "names": {"x", "y", "z"}}
    before = contents(tmp_path, state)
    assert contents(tmp_path, state) == before
    w.view(np.uint8)[777] ^= 1
    after = contents(tmp_path, {**state, "lr": 0.2})
    assert [name for name in before.leaves if before.leaves[name] != after.leaves[name]] == ["w"]
    assert [name for name in before.values if before.values[name] != after.values[name]] == ["lr"]


def test_contents_see_what_every_rank_has_for_itself(tmp_path: Path) -> None:
    def seen(*counts: int) -> dict[str, str]:
        path = tmp_path / f"{counts}"
        plan = WritePlan([], Topology.regular(2), block_nbytes=64)
        own = {rank: Own(local={"rng": {"drawn": drawn}}) for rank, drawn in enumerate(counts)}
        write_several(path, plan, {}, tree={"rng": {"$per_rank": "rng"}}, own=own, step=1)
        with open_newest(path) as opened:
            return contents_of(opened).values

    first, second, third = seen(3, 4), seen(3, 5), seen(2, 4)
    assert first.keys() == {"rng.drawn", "@1.rng"}
    assert (first["rng.drawn"], first["@1.rng"]) == (second["rng.drawn"], third["@1.rng"])
    assert first["@1.rng"] != second["@1.rng"]
    assert first["rng.drawn"] != third["rng.drawn"]


def test_contents_do_not_depend_on_where_the_bytes_lie_in_memory(tmp_path: Path) -> None:
    buffer = np.zeros(8 * 300_000 + 4096, np.uint8)
    found = []
    for start in (0, 8, 1032):
        w = buffer[start : start + 8 * 300_000].view(np.float64)
        w[:] = np.arange(300_000)
        found.append(contents(tmp_path, {"w": w}))
    assert found[0] == found[1] == found[2]


def test_contents_do_not_depend_on_the_order_of_a_set(tmp_path: Path) -> None:
    """Python gives the members of a set another order in every process."""
    code = """
import sys, everystep
everystep.save(sys.argv[1], {"seen": {"a", "b", "c", "d", ("e", frozenset({"f", "g"}))}})
"""
    found = []
    for seed in range(4):
        path = tmp_path / str(seed)
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        subprocess.run([sys.executable, "-c", code, str(path)], env=environment, timeout=240, check=True)
        with open_newest(path) as opened:
            found.append(contents_of(opened))
    assert found[1:] == found[:-1]


def test_contents_tell_tied_leaves_from_equal_ones(tmp_path: Path) -> None:
    w = np.arange(10.0)
    assert contents(tmp_path, {"a": w, "b": w}) != contents(tmp_path, {"a": w, "b": w.copy()})


def test_lines_about_checkpoints_hold_a_digest_of_each_leaf(tmp_path: Path) -> None:
    state = {"w": np.ones(4), "n": 3}
    info = everystep.save(tmp_path / "checkpoint", state)
    Drill(str(tmp_path / "drill"), "run", None).observe(Durable(7, info.path))
    line = (tmp_path / "drill" / drilling.DIARY).read_bytes().splitlines()[-1]
    observed = msgspec.json.decode(line, type=Observed)
    assert (observed.what, observed.step) == ("durable", 7)
    assert list(observed.contents.leaves) == ["w"]
    assert list(observed.contents.values) == ["n"]


@pytest.mark.parametrize("kill", [Kill("saving", 3, 17), Kill("restoring", 1)], ids=str)
def test_a_kill_survives_the_environment(kill: Kill) -> None:
    assert Kill.parse(str(kill)) == kill


@pytest.mark.parametrize("text", ["saving", "saving:x:1", "dreaming:1:1", "saving:1:2:3"])
def test_a_malformed_kill_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="EVERYSTEP_DRILL_KILL"):
        Kill.parse(text)


def test_a_process_told_to_dies_inside_the_save_and_loses_only_that(tmp_path: Path) -> None:
    assert train(tmp_path, str(Kill("saving", nth=4, step=3))) == -signal.SIGKILL
    assert told(tmp_path / "drill")[-2:] == [("completed", 3), ("saving", 3)]
    assert train(tmp_path) == 0
    restored = next(mark for mark in marks(tmp_path / "drill")[-20:] if mark.what == "restored" and mark.step)
    assert restored.step == 2
    assert told(tmp_path / "drill")[-1] == ("durable", 5)


def test_a_process_told_to_dies_while_it_restores(tmp_path: Path) -> None:
    assert train(tmp_path, str(Kill("saving", nth=4, step=4))) == -signal.SIGKILL
    assert train(tmp_path, str(Kill("restoring", nth=1))) == -signal.SIGKILL
    assert told(tmp_path / "drill")[-1][0] in ("opened", "restoring")
    assert train(tmp_path) == 0


def test_a_restore_with_fewer_calls_lives_and_says_how_many_it_had(tmp_path: Path) -> None:
    train(tmp_path, str(Kill("saving", nth=4, step=4)))
    assert train(tmp_path, str(Kill("restoring", nth=10_000))) == 0
    restored = [mark for mark in marks(tmp_path / "drill") if mark.what == "restored"]
    assert restored[0].calls is None
    assert restored[-1].calls is not None
    assert 0 < restored[-1].calls < 100
