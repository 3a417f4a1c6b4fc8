"""Ranks that are not where the others are: they come late, run ahead, or leave something out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.store.ranks.save_round import SaveLine, SaveRound
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.race


def _wait_for(other: int, word: str) -> None:
    """Until rank `other` has said that word; no other rank waits."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if dist.get_rank() == other:
        store.set(word, b"1")
    else:
        store.wait([word])


def _number_of_keys() -> int:
    """How many messages the store has, once everybody is here."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    dist.barrier()
    found = int(_get_default_store().num_keys())
    dist.barrier()
    return found


def _train_apart(folder: Path) -> dict[str, Any]:
    """Rank 0 runs ahead: through many steps that are not saved, then into a restore."""
    import torch.distributed as dist

    found: dict[str, Any] = {}
    state = {"w": np.zeros(10), "step": 0}
    with everystep.Checkpointer(
        folder / "run", state, mode="sync", every=1000, timeout=PATIENCE_SECONDS
    ) as c:
        if dist.get_rank() == 1:
            _wait_for(0, "ahead")
        for step in range(1, 301):
            c.save(step)
        if dist.get_rank() == 0:
            _wait_for(0, "ahead")
        state["step"] = 1000
        c.save(1000)
        for step in range(1001, 1004):
            state["step"] = step
            if dist.get_rank() == 1:
                _wait_for(0, f"restoring {step}")
            c.save(step)
            if dist.get_rank() == 0:
                _wait_for(0, f"restoring {step}")
            found[f"restored {step}"] = c.restore(), state["step"]
    before = _number_of_keys()
    for number in range(3):
        everystep.save(folder / "one", state, overwrite=number > 0, timeout=PATIENCE_SECONDS)
    found["left behind"] = _number_of_keys() - before
    return found


def test_the_coordinator_runs_ahead_of_the_others(tmp_path: Path) -> None:
    for found in values(launch(2, _train_apart, tmp_path)):
        assert found == {
            **{f"restored {step}": (1000, 1000) for step in range(1001, 1004)},
            "left behind": 0,
        }


def _leave_out_calls(folder: Path) -> list[Any]:
    """Rank 0 alone restores and compares, in vain; then all do."""
    import torch.distributed as dist

    found: list[Any] = []
    state = {"w": np.zeros(10), "step": 0}
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        c.save(1)
        dist.barrier()
        for call in (c.restore, c.check_replicas):
            if dist.get_rank() == 0:
                c._group.timeout = 2.0
                with pytest.raises(everystep.RankFailed, match="nothing heard from rank 1") as caught:
                    call()
                assert caught.value.ranks == (1,)
                # As patient as a slow machine needs: the silence has been heard.
                c._group.timeout = PATIENCE_SECONDS
            dist.barrier()
            found += [call(), call()]
            dist.barrier()
    return found


def test_a_rank_that_left_out_a_call_comes_to_the_next(tmp_path: Path) -> None:
    assert values(launch(2, _leave_out_calls, tmp_path)) == [[1, 1, None, None]] * 2


def _save_while_the_next_is_open(run: Path) -> list[int]:
    """Four saves. On rank 0 each ends when the next has been opened, and rank 1 joins that one after this."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store, rank = _get_default_store(), dist.get_rank()
    ended, begin = SaveLine.ended, SaveLine.begin

    def late(self: SaveLine, save_round: SaveRound) -> None:
        end = time.monotonic() + 2.0  # the last has no next
        while self.next < save_round.number + 2 and time.monotonic() < end:
            time.sleep(0.001)
        ended(self, save_round)
        store.set(f"ended {save_round.number}", b"1")

    def later(self: SaveLine, *given: Any) -> SaveRound:
        if rank == 1 and self.next:
            store.wait([f"ended {self.next - 1}"])
        return begin(self, *given)

    SaveLine.ended, SaveLine.begin = late, later  # type: ignore[method-assign, assignment]
    with everystep.Checkpointer(run, {"w": np.zeros(1000)}, mode="snapshot", timeout=20.0) as ckpt:
        found = [ckpt.save(step) for step in range(1, 5)]
        return [saving.result().step for saving in found if saving is not None]


def test_a_save_that_ends_late_leaves_the_messages_of_the_next(tmp_path: Path) -> None:
    assert values(launch(2, _save_while_the_next_is_open, tmp_path)) == [[1, 2, 3, 4]] * 2
