"""Fits that end at a chosen commit, and the comparison of what they find with scikit-learn's own fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning

from everystep.integrations.sklearn.record import FitRecord


class Interruption(BaseException):
    """As a kill: nothing that follows is done."""


@contextmanager
def ends_at(commit: int, before: bool) -> Iterator[list[int]]:
    """The commit of this number does not happen (`before`), or is the last that does."""
    original, count = FitRecord._commit, [0]

    def counted(self: FitRecord, *args: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == commit and before:
            raise Interruption
        original(self, *args, **options)
        if count[0] == commit and not before:
            raise Interruption

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FitRecord, "_commit", counted)
        yield count


def quietly(fit: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return fit()


def finish_interrupted(fit: Callable[[], Any], every: int = 1) -> tuple[Any, int]:
    """Ends `fit` at its commit number `every`, again and again, before or after it in turn, until it ends.

    Returns what it returned, and how often it was interrupted.
    """
    for turn in range(2000):
        # Before the first commit of a process nothing is gained, so every other process gets past it.
        before = turn % 2 == 0
        try:
            with ends_at(every + 1 if before else every, before):
                return quietly(fit), turn
        except Interruption:
            continue
    raise AssertionError("the fit never ends")


def assert_same_attributes(found: Any, expected: Any) -> None:
    """Every attribute that fitting has added is equal, bit for bit, and of the same type."""
    parameters = found.get_params(deep=False)
    mine = {name: value for name, value in vars(found).items() if name not in parameters}
    theirs = {name: value for name, value in vars(expected).items() if name not in parameters}
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        assert_identical(mine[name], value, name)


def assert_identical(found: Any, expected: Any, place: str = "") -> None:
    assert type(found) is type(expected), place
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        if expected.dtype.hasobject:
            assert found.tolist() == expected.tolist(), place
        else:
            assert found.tobytes() == expected.tobytes(), place
    elif isinstance(expected, np.random.RandomState):
        for one, other in zip(found.get_state(), expected.get_state(), strict=True):
            assert_identical(one, other, place)
    elif sparse.issparse(expected):
        assert_identical(found.toarray(), expected.toarray(), place)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_identical(one, other, f"{place}.{number}")
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            assert_identical(found[key], expected[key], f"{place}.{key}")
    elif hasattr(expected, "__dict__") and type(expected).__module__.startswith("sklearn"):
        for name in vars(expected):
            assert_identical(getattr(found, name), getattr(expected, name), f"{place}.{name}")
    elif isinstance(expected, float):
        assert np.float64(found).tobytes() == np.float64(expected).tobytes(), place
    elif type(expected).__module__.startswith("sklearn"):
        assert found.__reduce__() == expected.__reduce__(), place
    else:
        assert found == expected, place
