"""Shards on several volumes: each gets as much as it is fast."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.engine import faults
from everystep.store.commit import volumes
from everystep.store.names import LEDGER
from everystep.store.read.gather import FileReads, fetch


def test_bytes_go_to_volumes_in_proportion_to_their_measured_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "slow", tmp_path / "fast"]
    for folder in folders:
        folder.mkdir()

    def write_seconds(volume: str) -> float:
        return 3.0 if volume == os.fspath(folders[0]) else 1.0

    monkeypatch.setattr(volumes, "_write_seconds", write_seconds)
    state = {"w": np.arange(4 << 20, dtype=np.float32)}
    everystep.save(tmp_path / "one", state, options=everystep.Options(volumes=folders))
    slow, fast = (sum(f.stat().st_size for f in folder.rglob("*.safetensors")) for folder in folders)
    assert 2.9 < fast / slow < 3.1
    assert np.array_equal(everystep.load(tmp_path / "one")["w"], state["w"])


def test_measuring_writes_to_the_volume_and_leaves_nothing_there(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    speeds = volumes.measure([os.fspath(folder) for folder in folders])
    assert len(speeds) == 2
    assert min(speeds) > 0
    assert not any(list(folder.iterdir()) for folder in folders)


def test_a_run_writes_at_most_once_per_save_which_shards_are_to_go(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    state = {"w": np.zeros(100)}
    options = everystep.Options(volumes=[tmp_path / "volume"])
    keep = everystep.Keep(last=1)
    written = []
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync", options=options, keep=keep) as ckpt:
        for step in range(1, 7):
            with faults.traced() as events:
                ckpt.save(step)
            written.append(sum(event.path2.endswith(f"/{LEDGER}") for event in events))
    assert written[0] == 1
    assert set(written[1:]) <= {0, 1}
    # All but the shards that the last saves have given up are gone, and no longer listed.
    assert len((tmp_path / "run" / LEDGER).read_text().split()) <= 2
    assert len(list((tmp_path / "volume").rglob("*.safetensors"))) <= 2


def test_many_volumes_are_not_all_read_at_once() -> None:
    """The memory of a load does not grow with the number of directories that ranks wrote to."""
    among = threading.Barrier(8, timeout=60.0)
    lock = threading.Lock()
    active = most = done = 0

    class Reader:
        def file_problems(self, *args: Any, **options: Any) -> list[Any]:
            nonlocal active, most, done
            with lock:
                active += 1
                most = max(most, active)
            among.wait()
            with lock:
                active -= 1
                done += 1
            return []

    reads = [FileReads(rank, 0, f"/volume{rank}", ()) for rank in range(64)]
    fetch(reads, lambda rank: Reader(), verify=True)  # type: ignore[arg-type, return-value]
    assert (most, done) == (8, 64)
