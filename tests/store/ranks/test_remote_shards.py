"""Reading for other ranks: verified like a read of one's own, once for all that ask for the same."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import everystep
from everystep.format.records import Fragment
from everystep.store.ranks.remote_shards import Asked, _Desk
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint
from everystep.store.read.shard_reader import ShardReader

SIZE = 5 << 20


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    state = {"w": np.arange(SIZE, dtype=np.uint8), "v": np.full(1000, 3.0)}
    everystep.save(tmp_path / "one", state)
    return tmp_path / "one"


def _fragment(checkpoint: Checkpoint, leaf: str) -> Fragment:
    (fragment,) = checkpoint._parts.leaves_of(0)[leaf].fragments
    return fragment


def _asked(checkpoint: Checkpoint) -> tuple[Asked, ...]:
    """All of one leaf, and the third megabyte of the other."""
    w, v = _fragment(checkpoint, "w"), _fragment(checkpoint, "v")
    return (
        Asked(0, 0, "v", v.offset, v.nbytes),
        Asked(0, 0, "w", w.offset + (2 << 20), 1 << 20),
    )


def test_bytes_are_read_once_for_all_that_ask_for_them(stored: Path) -> None:
    expected = np.concatenate(
        [np.full(1000, 3.0).view(np.uint8), np.arange(SIZE, dtype=np.uint8)[2 << 20 : 3 << 20]]
    )
    with (
        open_checkpoint(str(stored)) as checkpoint,
        mock.patch.object(
            ShardReader, "file_problems", autospec=True, side_effect=ShardReader.file_problems
        ) as reads,
    ):
        desk = _Desk(checkpoint, verify=True)
        for _ in range(3):
            buffer = np.zeros(len(expected), np.uint8)
            desk.fill(_asked(checkpoint), buffer)
            assert np.array_equal(buffer, expected)
        assert desk.error is None
        assert reads.call_count == 1


def test_damage_is_kept_for_the_end_and_nothing_more_is_read(stored: Path) -> None:
    with open_checkpoint(str(stored)) as checkpoint:
        asked = _asked(checkpoint)
        (file,) = checkpoint._parts[0].files
        with open(stored / file.name, "r+b") as opened:
            opened.seek(asked[1].offset + 5)
            opened.write(b"damage")
        desk = _Desk(checkpoint, verify=True)
        desk.fill(asked, np.zeros(8000 + (1 << 20), np.uint8))
        assert isinstance(desk.error, everystep.CorruptCheckpoint)
        assert desk.error.leaf == "w"
        with mock.patch.object(ShardReader, "file_problems", side_effect=AssertionError):
            desk.fill(asked[:1], np.zeros(8000, np.uint8))


def test_bytes_that_are_in_no_fragment_are_refused(stored: Path) -> None:
    with open_checkpoint(str(stored)) as checkpoint:
        v = _fragment(checkpoint, "v")
        for asked in (
            Asked(0, 0, "v", v.offset + 1, v.nbytes),
            Asked(0, 0, "v", v.offset - 1, 8),
            Asked(0, 0, "gone", v.offset, 8),
        ):
            desk = _Desk(checkpoint, verify=True)
            desk.fill((asked,), np.zeros(asked.nbytes, np.uint8))
            assert isinstance(desk.error, everystep.CorruptCheckpoint)
