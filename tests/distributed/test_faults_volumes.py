"""Shards on volumes: striped over them, found again, and nothing left of what has failed or was given up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed.launcher import launch, values
from tests.distributed.worlds import error_of
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.engine import faults
from holdfast.store import volumes as store_volumes

KEPT = 2
SPEEDS = [2.0, 1.0]
NBYTES = 8 << 20
"""Each volume gets more than a megabyte of each rank: with less it would get nothing."""


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "fast", tmp_path / "slow"]
    for volume in found:
        volume.mkdir()
    return found


def _state(steps: int) -> dict[str, Any]:
    return {"w": np.arange(NBYTES // 4, dtype=np.float32) + steps}


def _train(run: Path, volumes: list[Path], failing: int | None) -> tuple[str, str]:
    """Five saves, one of which fails on a rank; what this one got then."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    store_volumes.measure = lambda volumes: SPEEDS[: len(volumes)]
    state = _state(0)
    got = ("", "")
    with holdfast.Checkpointer(
        run,
        state,
        mode="sync",
        keep=holdfast.Keep(last=KEPT),
        options=holdfast.Options(volumes=volumes),
        timeout=60.0,
    ) as checkpointer:
        for step in range(1, 6):
            state["w"] += 1
            if step == 3 and failing is not None:
                with faults.injected("write:1:ENOSPC" if rank == failing else ""):
                    got = error_of(lambda step=step: checkpointer.save(step))[:2]  # type: ignore[misc]
            else:
                checkpointer.save(step)
    return got


def _ids(run: Path) -> dict[int, str]:
    found = {}
    for path in run.glob("step-*"):
        with holdfast.open(path) as checkpoint:
            found[checkpoint.step] = checkpoint.id
    return found


def _there(volume: Path) -> set[str]:
    """The checkpoints that a volume holds something of."""
    return {str(path.name) for home in volume.iterdir() for path in home.iterdir()}


def _check(run: Path, volumes: list[Path], files: int) -> None:
    ids = _ids(run)
    assert sorted(ids) == [4, 5]
    for volume in volumes:
        # What retention has given up in the last save goes with the next.
        assert set(ids.values()) <= _there(volume)
        assert len(_there(volume)) <= KEPT + 1
        homes = [path for home in volume.iterdir() for path in home.iterdir() if path.name == ids[5]]
        assert [len(os.listdir(home)) for home in homes] == [files]
    sizes = [sum(path.stat().st_size for path in volume.rglob(f"{ids[5]}/*")) for volume in volumes]
    assert sizes[0] == pytest.approx(NBYTES * 2 / 3, rel=0.2)
    assert sum(sizes) == pytest.approx(NBYTES, rel=0.01)
    restored = _state(0)
    holdfast.load(run, restored)
    assert np.array_equal(restored["w"], _state(5)["w"])
    verified = CliRunner().invoke(app, ["verify", str(run)])
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize("failing", [0, 1])
def test_two_ranks_with_two_volumes(tmp_path: Path, volumes: list[Path], failing: int) -> None:
    run = tmp_path / "run"
    found = values(launch(2, _train, run, volumes, failing))
    kinds = [kind for kind, _ in found]
    assert kinds == ["StorageFull" if rank == failing else "RankFailed" for rank in range(2)]
    assert "on rank" in found[1 - failing][1]
    _check(run, volumes, files=2)

    # What is there is found again, and swept or kept by those who come next.
    resumed = _state(0)
    with holdfast.Checkpointer(
        run, resumed, mode="sync", keep=holdfast.Keep(last=1), options=holdfast.Options(volumes=volumes)
    ) as checkpointer:
        assert checkpointer.restore() == 5
        assert np.array_equal(resumed["w"], _state(5)["w"])
        checkpointer.save(6)
        checkpointer.save(7)
    ids = _ids(run)
    assert sorted(ids) == [7]
    for volume in volumes:
        assert ids[7] in _there(volume)
        assert len(_there(volume)) <= 2


@pytest.mark.parametrize("failing", [None, 0])
def test_one_process_with_two_volumes(
    tmp_path: Path, volumes: list[Path], failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(store_volumes, "measure", store_volumes.measure)
    assert _train(run, volumes, failing)[0] == ("" if failing is None else "StorageFull")
    _check(run, volumes, files=1)


def test_pruning_removes_what_is_on_volumes(
    tmp_path: Path, volumes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(store_volumes, "measure", store_volumes.measure)
    _train(run, volumes, None)
    newest = _ids(run)[5]
    pruned = CliRunner().invoke(app, ["prune", str(run), "--last", "1"])
    assert pruned.exit_code == 0, pruned.output
    ids = _ids(run)
    assert ids == {5: newest}
    for volume in volumes:
        assert newest in _there(volume)
        assert len(_there(volume)) <= 2  # step 3 was given up by the last save already: not the tool's


def test_a_volume_that_is_not_there(tmp_path: Path, volumes: list[Path]) -> None:
    options = holdfast.Options(volumes=[volumes[0], tmp_path / "unmounted"])
    with pytest.raises(holdfast.StorageMissing, match=r"there is no volume .*unmounted on "):
        holdfast.save(tmp_path / "model", _state(0), options=options)
    assert not (tmp_path / "unmounted").exists()
    single: dict[str, Any] = {"volumes": [tmp_path / "unmounted"]}
    with pytest.raises(holdfast.StorageMissing, match="unmounted"):
        holdfast.Checkpointer(tmp_path / "run", _state(0), options=holdfast.Options(**single))


def test_one_that_is_replaced_outside_of_a_run(tmp_path: Path, volumes: list[Path]) -> None:
    """Its shards go with it, and nobody else's."""
    options = holdfast.Options(volumes=[volumes[0]])
    run = tmp_path / "run"
    with holdfast.Checkpointer(run, {"w": np.ones(3)}, mode="sync", options=options) as checkpointer:
        checkpointer.save(1)
        for step in (5, 6):
            holdfast.save(run / "best", {"w": np.full(3, step)}, step=step, overwrite=True, options=options)
        checkpointer.save(2)
        checkpointer.save(3)
    assert len(_there(volumes[0])) == 4
    assert holdfast.load(run / "best")["w"].tolist() == [6, 6, 6]
    assert holdfast.load(run / "step-000000000001")["w"].tolist() == [1, 1, 1]
    with pytest.raises(holdfast.StorageFull), faults.injected("write:1:ENOSPC"):
        holdfast.save(tmp_path / "other", {"w": np.ones(3)}, options=options)
    assert len(_there(volumes[0])) == 4


def test_a_run_that_was_moved_away_keeps_its_shards(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    options = holdfast.Options(volumes=[tmp_path / "volume"])
    for number, name in enumerate(("first", "second", "third")):
        with holdfast.Checkpointer(
            tmp_path / "run",
            {"w": np.full(100, number)},
            mode="sync",
            options=options,
            keep=holdfast.Keep(last=1),
        ) as checkpointer:
            for step in range(1, 4):
                checkpointer.save(step)
        (tmp_path / "run").rename(tmp_path / name)
    for number, name in enumerate(("first", "second", "third")):
        assert holdfast.load(tmp_path / name)["w"].tolist() == [number] * 100
