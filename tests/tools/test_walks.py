"""`tools/walks.py` counts what it says it counts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch.distributed as dist
import walks

import everystep
from everystep.store.ranks.message_store import MessageStore


def counts(line: str) -> tuple[int, int]:
    found = re.search(r"([0-9,]+) calls +([0-9,]+) changes", line)
    assert found
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def test_walks_of_one_process_have_calls_and_changes(tmp_path: Path) -> None:
    save, load, commit, convert = map(counts, walks.one_process(tmp_path))
    for calls, changes in (save, load, convert):
        assert 0 < changes < calls
    assert 0 < commit[0] < save[0]
    assert commit[1] < save[1]


def test_all_threads_make_more_calls_than_the_training_s_own(tmp_path: Path) -> None:
    own, every = map(counts, walks.overlapped(tmp_path))
    assert 0 < own[0] < every[0]
    assert 0 < own[1] < every[1]


def test_nothing_is_counted_after_the_block(tmp_path: Path) -> None:
    walk = walks.Walk()
    with walk.counted():
        everystep.save(tmp_path / "first", {"w": np.zeros(3)})
    before = len(walk.calls)
    everystep.save(tmp_path / "second", {"w": np.zeros(3)})
    assert 0 < before == len(walk.calls)


def test_every_request_to_the_store_is_counted() -> None:
    messages = MessageStore(dist.HashStore(), "test")
    try:
        with walks.requests() as made:
            messages.post("a", b"1")
            assert messages.read("a", 1.0) == b"1"
        messages.post("a", b"2")
    finally:
        messages.close()
    assert len(made) == 2
