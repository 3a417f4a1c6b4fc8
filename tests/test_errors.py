"""Errors are also the builtin that a caller expects, with its errno, and stay so on their way to others."""

from __future__ import annotations

import copy
import errno
import pickle
from pathlib import Path

import pytest

import everystep
from everystep.engine import faults
from everystep.errors import MutatedDuringSave, ReadFailed, SaveFailed


def test_what_is_missing_and_what_exists_say_so_by_number(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at") as missing:
        everystep.load(tmp_path / "nothing")
    everystep.save(tmp_path / "c", {})
    with pytest.raises(FileExistsError, match="Checkpoint already exists") as existing:
        everystep.save(tmp_path / "c", {})
    for caught, number in ((missing, errno.ENOENT), (existing, errno.EEXIST)):
        again = pickle.loads(pickle.dumps(caught.value))
        for error in (caught.value, again):
            assert error.errno == number
            assert "Errno" not in str(error)
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_a_failure_keeps_number_and_file_when_it_is_pickled(tmp_path: Path) -> None:
    with faults.injected("mkdir:1:ENOENT"), pytest.raises(everystep.errors.StorageMissing) as caught:
        everystep.save(tmp_path / "no" / "c", {})
    mutated = MutatedDuringSave("weights changed", leaves=["w"])
    unread = ReadFailed("cannot read it")
    unread.errno, unread.filename = errno.EIO, "r00000"
    for error in (caught.value, mutated, unread, SaveFailed("by itself")):
        assert isinstance(error, OSError)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(again), str(again)) == (type(error), str(error))
            assert (again.errno, again.filename) == (error.errno, error.filename)
            assert getattr(again, "leaves", None) == getattr(error, "leaves", None)
    assert caught.value.errno == errno.ENOENT
