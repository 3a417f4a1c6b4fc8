"""What ranks raise when one of them failed: its own error there, the fitting one everywhere else."""

from __future__ import annotations

import errno

import msgspec
import pytest

from everystep.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    EverystepError,
    IncompleteCheckpoint,
    OutOfResources,
    RankFailed,
    ReadFailed,
    StateMismatch,
)
from everystep.store.ranks.errors import RankError, raise_worst
from everystep.store.read.read_errors import read_error, shows_damage


def _raised(*errors: Exception | None) -> list[Exception | None]:
    """What each rank raises, when each has met the error at its place."""
    failures = []
    for rank, error in enumerate(errors):
        if error is not None:
            told = msgspec.msgpack.encode(RankError.of(rank, error))
            failures.append(msgspec.msgpack.decode(told, type=RankError))
    found: list[Exception | None] = []
    for error in errors:
        try:
            raise_worst(failures, error, "the load")
            found.append(None)
        except EverystepError as raised:
            found.append(raised)
    return found


def test_nothing_is_raised_where_nothing_failed() -> None:
    assert _raised(None, None) == [None, None]


def test_damage_is_damage_on_all_ranks_and_names_file_leaf_and_rank() -> None:
    mine = CorruptCheckpoint("chunk 3 differs", path="/run/step-7/r00001", leaf="model.w")
    first, own, last = _raised(None, mine, None)
    assert own is mine
    for other in (first, last):
        assert type(other) is CorruptCheckpoint
        assert (other.path, other.leaf) == (mine.path, mine.leaf)
        assert "rank 1" in str(other)
        assert "chunk 3 differs" in str(other)


def test_a_missing_file_is_missing_on_all_ranks() -> None:
    other, _ = _raised(None, IncompleteCheckpoint("gone", path="r00001.json"))
    assert type(other) is IncompleteCheckpoint


def test_where_no_checkpoint_is_there_is_none_for_all_ranks() -> None:
    mine = CheckpointNotFound("there is no checkpoint at /run/best")
    own, other = _raised(mine, None)
    assert own is mine
    assert type(other) is CheckpointNotFound
    assert str(other) == "found by rank 0: there is no checkpoint at /run/best"


def test_all_ranks_raise_the_same_kind_when_several_failed_differently() -> None:
    unread = ReadFailed("the device said no")
    unread.errno, unread.filename = 5, "r00000"
    damaged = CorruptCheckpoint("torn")
    own = StateMismatch("does not fit")
    found = _raised(unread, own, damaged, None)
    assert all(isinstance(error, CorruptCheckpoint) for error in found)
    assert found[0].__cause__ is unread
    assert found[2] is damaged
    unread_too = _raised(unread, own, None)[2]
    assert isinstance(unread_too, ReadFailed)
    assert (unread_too.errno, unread_too.filename) == (5, "r00000")


def test_a_rank_without_descriptors_is_named_and_not_taken_for_damage() -> None:
    lacking = read_error("cannot read r00001: Too many open files", errno.EMFILE, "r00001")
    unread = read_error("the device said no", errno.EIO, "r00000")
    first, own, _ = _raised(None, lacking, None)
    assert own is lacking
    assert isinstance(first, OutOfResources)
    assert first.errno == errno.EMFILE
    assert "rank 1: cannot read r00001: Too many open files" in str(first)
    assert not any(shows_damage(error) for error in (first, own))
    # What another has seen to be damaged is damaged for all.
    assert all(error is not None and shows_damage(error) for error in _raised(lacking, unread, None))


@pytest.mark.parametrize("own", [StateMismatch("does not fit"), OSError(28, "full"), RuntimeError()])
def test_what_only_one_rank_has_met_names_that_rank(own: Exception) -> None:
    failure = RankError.of(2, own)
    with pytest.raises(RankFailed) as caught:
        raise_worst([failure], None, "the load")
    assert caught.value.ranks == (2,)
    with pytest.raises(type(own)) as mine:
        raise_worst([failure], own, "the load")
    assert mine.value is own


def test_a_rank_that_lost_another_names_the_lost_one() -> None:
    with pytest.raises(RankFailed) as caught:
        raise_worst([RankError.of(0, RankFailed("no word from it", ranks=[3]))], None, "the load")
    assert caught.value.ranks == (3,)


def test_names_that_are_not_unicode_can_be_reported() -> None:
    error = CorruptCheckpoint("bad \udcff", path="/run/\udcff", leaf="x\ud800")
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(RankError.of(0, error)), type=RankError)
    assert told.path == "/run/\\udcff"
