"""Several ranks on a run whose path comes to lead to another: all are told, the other one is untouched."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import everystep
from checkpointer.test_moved_runs import content, link_to_another, opened, rename_and_put_another
from everystep import Checkpointer, Keep
from everystep.store import step_name
from support.worlds.disturbed_trainings import error_of
from support.worlds.launcher import launch, values


def _train(folder: Path, move: str) -> list[str]:
    import torch.distributed as dist

    state = {"w": np.arange(100_000)}
    found = []
    with Checkpointer(folder / "current", state, keep=Keep(last=1), mode="sync", timeout=60.0) as ckpt:
        for step in range(1, 4):
            ckpt.save(step)
        dist.barrier()
        if dist.get_rank() == 0:
            globals()[move](folder / "current")
        dist.barrier()
        for step in range(4, 7):
            found.append(error_of(lambda step=step: ckpt.save(step))[0])  # type: ignore[misc]
    return found


def test_all_ranks_raise_when_the_run_has_moved(tmp_path: Path) -> None:
    for move in (link_to_another, rename_and_put_another):
        folder = tmp_path / move.__name__
        folder.mkdir()
        opened(folder, move)
        with Checkpointer(
            folder / "other", {"w": np.zeros(100_000)}, keep=Keep(last=9), mode="sync"
        ) as other:
            for step in range(1, 4):
                other.save(step)
        before = content(folder / "other")
        assert values(launch(2, _train, folder, move.__name__)) == [["RunMoved"] * 3, ["RankFailed"] * 3]
        moved = move is rename_and_put_another
        assert content(folder / ("current" if moved else "other")) == before
        assert everystep.verify(folder / ("moved" if moved else "first") / step_name(3)).intact
