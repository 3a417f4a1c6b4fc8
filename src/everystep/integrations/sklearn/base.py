"""What the three estimators share: the parameter `shelf`, the fit's identity, and the stored result."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from everystep.integrations.sklearn.fingerprints import describe, of_parameters
from everystep.integrations.sklearn.record import Finished, FitRecord
from everystep.integrations.sklearn.versions import VERSION
from everystep.shelf import Shelf

SHELF_CONSTRAINT: dict[str, list[Any]] = {"shelf": [str, os.PathLike, Shelf, None]}


class FitProgress:
    """How far one fit is: made for each call of ``fit``, opened when scikit-learn has validated the data."""

    def __init__(self, estimator: Any, also: Mapping[str, str]) -> None:
        self.estimator, self._also = estimator, also
        self.record = FitRecord(estimator.shelf, "fit.")

    def begin(self, X: Any, nbytes: int) -> None:
        """Opens the shelf. Raises `Finished` if it holds the result of this very fit."""
        kind = type(self.estimator).__name__
        identity = {
            "estimator": kind,
            "scikit-learn": VERSION,
            "data": describe(X),
            **self._also,
            **of_parameters(self.estimator.get_params(deep=False)),
        }
        self.record.open(identity, nbytes)
        if self.record.get("finished") is not None:
            raise Finished

    def set_random_state(self, random_state: np.random.RandomState) -> None:
        """Lets the fit's generator go on where the shelf says. NumPy's global one is left alone."""
        stored = self.record.get("random")
        if stored is not None and self.estimator.random_state is not None:
            kind, position, has_gauss, cached = stored
            random_state.set_state((kind, self.record.copy("random.key"), position, has_gauss, cached))

    @staticmethod
    def random_entries(random_state: np.random.RandomState) -> dict[str, Any]:
        kind, key, *rest = random_state.get_state(legacy=True)
        return {"random": (kind, *rest), "random.key": key}


def number_entry(value: Any) -> Any:
    """A number with its type: NumPy's numbers calculate in other ways than Python's."""
    return (value.dtype.str, value.item()) if isinstance(value, np.generic) else (None, value)


def number_again(entry: Any) -> Any:
    kind, value = entry
    return value if kind is None else np.dtype(kind).type(value)


class Resumable:
    """Mixed into an estimator with the parameter `shelf`."""

    shelf: Any
    _everystep_fit: FitProgress | None = None

    def _fit_on_shelf(self, progress: FitProgress, fit: Callable[[], Any]) -> Any:
        """Runs scikit-learn's ``fit``; returns what it returned, or what it returned when it was finished."""
        self._everystep_fit = progress
        record = progress.record
        try:
            try:
                result = fit()
            except Finished:
                record.restore_attributes(self)
                if isinstance(self.random_state, np.random.RandomState):  # type: ignore[attr-defined]
                    progress.set_random_state(self.random_state)  # type: ignore[attr-defined]
                return record.copy("result") if record.get("result") is not None else self
            entries = {"finished": True}
            if isinstance(self.random_state, np.random.RandomState):  # type: ignore[attr-defined]
                entries |= progress.random_entries(self.random_state)  # type: ignore[attr-defined]
            if result is not self:
                entries["result"] = result
            attributes = {name for name in record.names() if name.startswith("attribute")}
            record.commit_attributes(
                self, entries, remove=set(record.names()) - attributes - {"identity", *entries}
            )
            return result
        finally:
            del self._everystep_fit
            record.close()

    def __getstate__(self) -> Any:
        """An open shelf stays in its process: a pickle has its path."""
        state = super().__getstate__()  # type: ignore[misc]
        shelf = state.get("shelf")
        return {**state, "shelf": os.fspath(shelf.path)} if isinstance(shelf, Shelf) else state

    def __sklearn_clone__(self) -> Any:
        """Clones share an open shelf; it cannot be copied as other parameters are."""
        bare = copy.copy(self)
        bare.shelf = None
        twin = super(Resumable, bare).__sklearn_clone__()  # type: ignore[misc]
        twin.shelf = self.shelf
        return twin
