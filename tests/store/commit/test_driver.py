"""The driver of a commit between processes that have no transport: its round is all that it needs of them."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

import everystep
from everystep.engine import faults
from everystep.errors import RankFailed
from everystep.state import flatten
from everystep.store import Commit, SaveObserver, Transaction
from everystep.store.commit.round import Committed, Opened, Round, ShareWritten
from everystep.store.commit.share import Share
from everystep.store.ranks.errors import failing_the_save

SECONDS = 60
STATE = {"first": np.arange(1000.0), "second": np.arange(7)}


class Thread:
    """What two threads tell each other, in the order in which they say it."""

    def __init__(self) -> None:
        self.to_other: Queue[object] = Queue()
        self.to_coordinator: Queue[object] = Queue()


class ThreadRound(Round):
    """Rank 0 or 1 of two threads. A failure travels in the place of what is left to say."""

    world = 2

    def __init__(self, rank: int, between: Thread) -> None:
        self.rank = rank
        self.maybe_committed: bool | None = None
        self._out = between.to_coordinator if rank else between.to_other
        self._in = between.to_other if rank else between.to_coordinator
        self._rejected = False

    @property
    def rejected(self) -> bool:
        return self._rejected

    def _hear(self) -> object:
        said = self._in.get(timeout=SECONDS)
        if isinstance(said, BaseException):
            self._rejected = True
            raise RankFailed(str(said), ranks=[1 - self.rank])
        return said

    def open(self, opened: Opened | None) -> Opened:
        if opened is not None:
            self._out.put(opened)
            return opened
        heard = self._hear()
        assert isinstance(heard, Opened)
        return heard

    def collect(self, written: ShareWritten) -> list[ShareWritten]:
        if self.rank:
            self._out.put(written)
            return []
        heard = self._hear()
        assert isinstance(heard, ShareWritten)
        return [written, heard]

    def end(self, committed: Committed | None) -> Committed:
        if committed is not None:
            self._out.put(committed)
            return committed
        heard = self._hear()
        assert isinstance(heard, Committed)
        return heard

    def failed(self, error: BaseException, *, maybe_committed: bool = False) -> None:
        if self.maybe_committed is None:
            self.maybe_committed = maybe_committed
            self._out.put(error)

    def await_others(self) -> None:
        with suppress(RankFailed):
            self._hear()


def share_of(rank: int) -> Share:
    """Each rank writes one of the two arrays."""
    flat = flatten(STATE)
    return Share(tree=None if rank else flat.tree, leaves=(flat.leaves[rank],), aliases=(), local={}, count=2)


def commit(path: Path, observers: list[SaveObserver]) -> tuple[list[object], list[ThreadRound]]:
    """What each of two ranks returns or raises, and their rounds."""
    between = Thread()
    rounds = [ThreadRound(rank, between) for rank in range(2)]
    tuning = everystep.Options().tuning()

    def run(rank: int) -> object:
        one = Commit(Transaction(str(path)), 5, {}, tuning, id="5" * 32, created=1.0, round=rounds[rank])
        try:
            return one.run(share_of(rank), observer=observers[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2))), rounds


class Failing(SaveObserver):
    """Fails at one moment of a commit."""

    def __init__(self, moment: str) -> None:
        setattr(self, moment, self._fail)

    def _fail(self) -> None:
        raise KeyError("a bug in the training")


def test_two_processes_commit_one_checkpoint(tmp_path: Path) -> None:
    infos, _ = commit(tmp_path / "both", [SaveObserver(), SaveObserver()])
    first, second = infos
    assert isinstance(first, everystep.CheckpointInfo)
    assert isinstance(second, everystep.CheckpointInfo)
    assert (first.nbytes, first.stored_nbytes, first.leaves) == (8056, second.stored_nbytes, 2)
    with everystep.open(tmp_path / "both") as checkpoint:
        assert (checkpoint.step, checkpoint.world, checkpoint.id) == (5, 2, "5" * 32)
        for name, array in STATE.items():
            assert np.array_equal(checkpoint[name][:], array)
    assert everystep.verify(tmp_path / "both").intact


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_fails_neither_commits(tmp_path: Path, rank: int) -> None:
    observers = [SaveObserver(), SaveObserver()]
    observers[rank] = Failing("written")
    found, rounds = commit(tmp_path / "both", observers)
    assert isinstance(found[rank], KeyError)
    assert isinstance(found[1 - rank], RankFailed)
    assert rounds[rank].maybe_committed is False
    assert list(tmp_path.iterdir()) == []


def test_a_failure_after_the_rename_does_not_say_that_nothing_was_committed(tmp_path: Path) -> None:
    """Otherwise the other ranks would remove their shards from volumes, and the checkpoint needs them."""
    found, rounds = commit(tmp_path / "both", [Failing("committed"), SaveObserver()])
    assert isinstance(found[0], KeyError)
    assert rounds[0].maybe_committed is True
    assert everystep.verify(tmp_path / "both").intact


@pytest.mark.parametrize("elements", [10, 1 << 20])
@pytest.mark.parametrize("ranks", [False, True])
def test_the_error_of_a_failed_save_keeps_no_memory(tmp_path: Path, elements: int, ranks: bool) -> None:
    """The state is free when the error is: no cycle waits for the garbage collector."""
    array = np.zeros(elements, np.float32)
    alive = weakref.ref(array)
    gc.disable()
    try:
        with (
            pytest.raises(everystep.SaveFailed, match="not durable"),
            faults.injected("sync:1:EIO"),
            failing_the_save() if ranks else nullcontext(),
        ):
            everystep.save(tmp_path / "a", {"w": array})
        del array
        assert alive() is None
    finally:
        gc.enable()
