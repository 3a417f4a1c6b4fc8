"""Shards on volumes: striped over them, found again, and nothing left of what has failed or was given up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

import everystep
from everystep.checkpointer import retention
from everystep.cli.app import app
from everystep.engine import faults
from everystep.engine.fs import OpenDirectory
from everystep.format.manifest import encode_root
from everystep.store.commit import driver
from everystep.store.commit import volumes as store_volumes
from everystep.store.read.checkpoint import open_newest
from support.worlds.disturbed_trainings import error_of
from support.worlds.launcher import launch, values

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
    with everystep.Checkpointer(
        run,
        state,
        mode="sync",
        keep=everystep.Keep(last=KEPT),
        options=everystep.Options(volumes=volumes),
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
        with everystep.open(path) as checkpoint:
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
    everystep.load(run, restored)
    assert np.array_equal(restored["w"], _state(5)["w"])
    verified = CliRunner().invoke(app, ["verify", str(run)])
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize("failing", [0, 1])
def test_two_ranks_with_two_volumes(
    tmp_path: Path, volumes: list[Path], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    found = values(launch(2, _train, run, volumes, failing))
    kinds = [kind for kind, _ in found]
    assert kinds == ["StorageFull" if rank == failing else "RankFailed" for rank in range(2)]
    assert "on rank" in found[1 - failing][1]
    _check(run, volumes, files=2)

    # What is there is found again, and swept or kept by those who come next.
    monkeypatch.setattr(store_volumes, "measure", lambda volumes: SPEEDS[: len(volumes)])
    resumed = _state(0)
    with everystep.Checkpointer(
        run, resumed, mode="sync", keep=everystep.Keep(last=1), options=everystep.Options(volumes=volumes)
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


def _train_beside(run: Path, volume: Path) -> None:
    """Only the other rank has a volume. In the end both are killed in the middle of a save."""
    import torch.distributed as dist

    state = _state(0)
    options = everystep.Options(volumes=[volume] if dist.get_rank() else [])
    with everystep.Checkpointer(
        run, state, mode="sync", keep=everystep.Keep(last=KEPT), options=options, timeout=60.0
    ) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step)
    faults.install(*faults.parse("sync:1:kill"))
    everystep.save(run.with_name("model"), state, options=options, timeout=60.0)


def _save_beside(path: Path, volume: Path) -> None:
    import torch.distributed as dist

    options = everystep.Options(volumes=[volume] if dist.get_rank() else [])
    everystep.save(path, _state(0), options=options, timeout=60.0)


def test_volumes_that_rank_0_has_none_of_are_cleaned_up_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    killed = launch(2, _train_beside, tmp_path / "run", tmp_path / "volume")
    assert [rank.exitcode for rank in killed] == [-signal.SIGKILL] * 2
    assert len(list(tmp_path.glob("volume/run-*/*"))) <= KEPT + 1
    assert len(list(tmp_path.glob("volume/model-*/*"))) == 1
    values(launch(2, _save_beside, tmp_path / "model", tmp_path / "volume"))
    assert len(list(tmp_path.glob("volume/model-*/*"))) == 1


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


def test_what_pruning_could_not_remove_keeps_its_shards_when_it_is_moved_away(
    tmp_path: Path, volumes: list[Path]
) -> None:
    run, options = tmp_path / "run", everystep.Options(volumes=[volumes[0]])
    with everystep.Checkpointer(run, {"w": np.ones(100)}, mode="sync", options=options) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    with faults.injected("rename:1:EIO"):
        assert CliRunner().invoke(app, ["prune", str(run), "--last", "1"]).exit_code == 1
    (run / "step-000000000001").rename(tmp_path / "archive")
    with everystep.Checkpointer(run, {"w": np.ones(100)}, mode="sync", options=options) as checkpointer:
        checkpointer.restore()
        checkpointer.save(3)
    assert everystep.verify(tmp_path / "archive").intact


def test_a_volume_that_is_not_there(tmp_path: Path, volumes: list[Path]) -> None:
    options = everystep.Options(volumes=[volumes[0], tmp_path / "unmounted"])
    with pytest.raises(everystep.errors.StorageMissing, match=r"the volume .*unmounted does not exist on "):
        everystep.save(tmp_path / "model", _state(0), options=options)
    assert not (tmp_path / "unmounted").exists()
    single: dict[str, Any] = {"volumes": [tmp_path / "unmounted"]}
    with pytest.raises(everystep.errors.StorageMissing, match="unmounted"):
        everystep.Checkpointer(tmp_path / "run", _state(0), options=everystep.Options(**single))


def test_one_that_is_replaced_outside_of_a_run(tmp_path: Path, volumes: list[Path]) -> None:
    """Its shards go with it, and no others."""
    options = everystep.Options(volumes=[volumes[0]])
    run = tmp_path / "run"
    with everystep.Checkpointer(run, {"w": np.ones(3)}, mode="sync", options=options) as checkpointer:
        checkpointer.save(1)
        for step in (5, 6):
            everystep.save(run / "best", {"w": np.full(3, step)}, step=step, overwrite=True, options=options)
        checkpointer.save(2)
        checkpointer.save(3)
    assert len(_there(volumes[0])) == 4
    assert everystep.load(run / "best")["w"].tolist() == [6, 6, 6]
    assert everystep.load(run / "step-000000000001")["w"].tolist() == [1, 1, 1]
    with pytest.raises(everystep.errors.StorageFull), faults.injected("write:1:ENOSPC"):
        everystep.save(tmp_path / "other", {"w": np.ones(3)}, options=options)
    assert len(_there(volumes[0])) == 4


def test_a_run_that_was_moved_away_keeps_its_shards(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    options = everystep.Options(volumes=[tmp_path / "volume"])
    for number, name in enumerate(("first", "second", "third")):
        with everystep.Checkpointer(
            tmp_path / "run",
            {"w": np.full(100, number)},
            mode="sync",
            options=options,
            keep=everystep.Keep(last=1),
        ) as checkpointer:
            for step in range(1, 4):
                checkpointer.save(step)
        (tmp_path / "run").rename(tmp_path / name)
    for number, name in enumerate(("first", "second", "third")):
        assert everystep.load(tmp_path / name)["w"].tolist() == [number] * 100


def test_a_checkpoint_that_was_moved_away_keeps_its_shards(tmp_path: Path, volumes: list[Path]) -> None:
    options = everystep.Options(volumes=[volumes[0]])
    for number in range(3):
        everystep.save(tmp_path / "model", {"w": np.full(100, number)}, options=options)
        (tmp_path / "model").rename(tmp_path / f"model{number}")
    for number in range(3):
        assert everystep.load(tmp_path / f"model{number}")["w"].tolist() == [number] * 100


def test_one_that_could_not_be_retired_and_was_moved_away_keeps_its_shards(
    tmp_path: Path, volumes: list[Path]
) -> None:
    run, options = tmp_path / "run", everystep.Options(volumes=[volumes[0]])
    with everystep.Checkpointer(
        run, {"w": np.ones(100)}, mode="sync", keep=everystep.Keep(last=1), options=options
    ) as checkpointer:
        checkpointer.save(1)
        with faults.injected("rename:2:EIO"), pytest.warns(RuntimeWarning, match="could not be removed"):
            checkpointer.save(2)
        (run / "step-000000000001").rename(tmp_path / "archive")
        with pytest.warns(RuntimeWarning, match="could not be removed"):
            checkpointer.save(3)
    assert everystep.verify(tmp_path / "archive").intact


@pytest.mark.filterwarnings("ignore:.*could not remove")
def test_a_checkpoint_that_was_moved_out_of_its_run_keeps_its_shards(
    tmp_path: Path, volumes: list[Path]
) -> None:
    run = tmp_path / "run"
    state = {"w": np.zeros(100)}
    for step in range(1, 7):
        with everystep.Checkpointer(
            run,
            state,
            mode="sync",
            options=everystep.Options(volumes=[volumes[0]]),
            keep=everystep.Keep(last=1),
        ) as checkpointer:
            assert checkpointer.restore() == step - 1
            state["w"] += 1
            checkpointer.save(step)
            if step == 2:
                (run / "step-000000000002").rename(run / "best")
            checkpointer.save(step)  # replaces it, if it is still there
    assert everystep.load(run / "best")["w"].tolist() == [2] * 100
    assert everystep.verify(run).intact
    assert len(_there(volumes[0])) == 2


def _train_with_own_volume(run: Path, root: Path) -> set[str]:
    import torch.distributed as dist

    volume = root / f"volume{dist.get_rank()}"
    volume.mkdir()
    with everystep.Checkpointer(
        run,
        {"w": np.zeros(1 << 17)},
        mode="sync",
        keep=everystep.Keep(last=1),
        options=everystep.Options(volumes=[volume]),
        timeout=60.0,
    ) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step)
    return _there(volume)


def test_ranks_of_a_node_that_have_volumes_of_their_own(tmp_path: Path) -> None:
    """All that is retired goes from all of them."""
    run = tmp_path / "run"
    for there in values(launch(2, _train_with_own_volume, run, tmp_path)):
        assert set(_ids(run).values()) <= there
        assert len(there) == 2


def _prune(run: Path) -> None:
    pruned = CliRunner().invoke(app, ["prune", str(run), "--last", "1"])
    assert pruned.exit_code == 0, pruned.output


def test_pruning_a_copy_of_a_run_leaves_the_shards_to_the_original(
    tmp_path: Path, volumes: list[Path]
) -> None:
    with everystep.Checkpointer(
        tmp_path / "run",
        {"w": np.ones(100)},
        mode="sync",
        options=everystep.Options(volumes=[volumes[0]]),
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    _prune(tmp_path / "copy")
    assert sorted(_ids(tmp_path / "copy")) == [3]
    for step in (1, 2, 3):
        assert everystep.verify(tmp_path / "run" / f"step-{step:012d}").intact
    _prune(tmp_path / "run")
    assert _there(volumes[0]) == set(_ids(tmp_path / "run").values())


def test_pruning_removes_nothing_that_only_a_manifest_claims(tmp_path: Path, volumes: list[Path]) -> None:
    """A run may come from anywhere."""
    run, options = tmp_path / "run", everystep.Options(volumes=[volumes[0]])
    with everystep.Checkpointer(run, {"w": np.ones(100)}, mode="sync", options=options) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    precious = tmp_path / "precious"
    path = run / "step-000000000001"
    with open_newest(path) as checkpoint:
        (file,) = checkpoint._parts.root.part.files
        assert file.volume is not None
        shutil.copytree(file.volume, precious)
        (precious / "letters").mkdir()
        part = structs.replace(
            checkpoint._parts.root.part, files=(structs.replace(file, volume=str(precious)),)
        )
        (path / "manifest.json").write_bytes(encode_root(structs.replace(checkpoint._parts.root, part=part)))
    _prune(run)
    assert sorted(_ids(run)) == [2]
    assert sorted(os.listdir(precious)) == ["letters", file.name]


def test_volumes_that_cannot_be_written_to(tmp_path: Path, volumes: list[Path]) -> None:
    options = everystep.Options(volumes=volumes)
    for fault, kind in (
        ("write:1:ENOSPC", everystep.errors.StorageFull),
        ("open:1:EROFS", everystep.errors.StorageDenied),
    ):
        with pytest.raises(kind, match=str(volumes[0])), faults.injected(fault):
            everystep.save(tmp_path / "model", {"w": np.ones(3)}, options=options)
    with pytest.raises(ValueError, match="UTF-8"):
        everystep.save(
            tmp_path / "model", {"w": np.ones(3)}, options=everystep.Options(volumes=[os.fsdecode(b"/\xff")])
        )
    assert not any(os.listdir(volume) for volume in volumes)
    assert not (tmp_path / "model").exists()


def _save_without_a_shared_directory(path: Path, other: Path) -> tuple[str, str]:
    """Rank 1 is on another host, where there is a leftover of the same name."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        socket.gethostname = lambda: "elsewhere"
        opened = driver.open_partial

        @contextlib.contextmanager
        def opened_here(path: str) -> Iterator[OpenDirectory]:
            with opened(os.fspath(other)) as directory:
                yield directory

        driver.open_partial = opened_here
    return error_of(lambda: everystep.save(path, {"w": np.ones(1 << 17)}, timeout=60.0))[:2]


def test_ranks_that_do_not_share_the_directory(tmp_path: Path) -> None:
    """No rank reports it durable."""
    other = tmp_path / "other"
    other.mkdir()
    found = values(launch(2, _save_without_a_shared_directory, tmp_path / "model", other))
    assert [kind for kind, _ in found] == ["RankFailed", "StorageMissing"]
    assert all("All ranks must share this directory" in text for _, text in found)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.partial").exists()


def _save_from_two_hosts(path: Path) -> bool:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        socket.gethostname = lambda: "elsewhere"
    state = {"w": np.arange(1 << 17)}
    for _ in range(2):
        everystep.save(path, state, overwrite=True, timeout=60.0)
    return True


def test_ranks_of_two_hosts_that_share_the_directory(tmp_path: Path) -> None:
    assert values(launch(2, _save_from_two_hosts, tmp_path / "model")) == [True, True]
    report = everystep.verify(tmp_path / "model")
    assert report.intact
    assert not report.strangers


def test_a_checkpoint_that_is_taken_away_while_a_save_looks_at_it(
    tmp_path: Path, volumes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = everystep.Options(volumes=[volumes[0]])
    with everystep.Checkpointer(run, {"w": np.ones(3)}, mode="sync", options=options) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)

        def list_steps(run: str, known: Callable[[str], list[int]] = retention.list_steps) -> list[int]:
            found = known(run)
            if 1 in found:
                os.rename(os.path.join(run, "step-000000000001"), tmp_path / "mine")
            return found

        monkeypatch.setattr(retention, "list_steps", list_steps)
        checkpointer.save(3)
    assert everystep.verify(tmp_path / "mine").intact
    assert sorted(_ids(run)) == [2, 3]


def _names_that_are_not_utf8(folder: str) -> list[str]:
    import torch.distributed as dist

    state = {"w": np.arange(1 << 17)}
    options = everystep.Options(volumes=[folder])
    path = os.path.join(folder, os.fsdecode(b"M\xfcller"))
    everystep.save(path, state, options=options, timeout=60.0)
    found = [error_of(lambda: everystep.save(path, state, options=options, timeout=60.0))[0]]
    found.append(error_of(lambda: everystep.load(path + "!", dict(state), timeout=60.0))[0])
    for step in (1, 2):
        with everystep.Checkpointer(
            path + "-run", state, mode="sync", options=options, timeout=60.0
        ) as checkpointer:
            assert checkpointer.restore() == step - 1
            checkpointer.save(step)
    for where in (path, path + "-run"):
        restored = {"w": np.zeros_like(state["w"])}
        everystep.load(where, restored, timeout=60.0)
        found.append("equal" if np.array_equal(restored["w"], state["w"]) else f"rank {dist.get_rank()}")
    return found


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """They are sent from rank to rank, and shown in errors, as those of one process are."""
    first, second = values(launch(2, _names_that_are_not_utf8, str(tmp_path)))
    assert first == ["CheckpointExists", "CheckpointNotFound", "equal", "equal"]
    assert second == ["CheckpointExists", "CheckpointNotFound", "equal", "equal"]
