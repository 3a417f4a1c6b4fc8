"""One fit on a shelf: which fit it is, how far it is, and its arrays.

A `FitRecord` opens the shelf, compares identities, and commits: at once, or beside the next iteration, in a
thread that mostly waits for the device. The loops (`kmeans`, `minibatch`, `mixture`,
`streams`) decide what a fit stores and where it goes on.

A shelf file holds one fit. A directory holds one shelf file per fit, named by its fingerprint: for clones
(`GridSearchCV`), for several processes, and for one fit after the other with ``warm_start``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everystep.engine.threads import Background
from everystep.errors import StateMismatch
from everystep.integrations.sklearn.estimator_state import attributes_of, put_together, take_apart
from everystep.integrations.sklearn.fingerprints import of_identity
from everystep.paths import local_path
from everystep.shelf import Shelf

ShelfLike = str | os.PathLike[str] | Shelf | None
_SPARE_NBYTES = 64 << 20


class Finished(Exception):
    """Ends scikit-learn's ``fit`` where it starts to compute: the shelf holds its result."""


class FitRecord:
    """A fit's entries on a shelf. Their names start with `prefix`; other names are not touched."""

    def __init__(self, where: ShelfLike, prefix: str) -> None:
        self._where, self._prefix = where, prefix
        self._shelf: Shelf | None = None
        self._identity: dict[str, str] = {}
        self._stored = False
        self._pending: Background[None] | None = None

    def open(self, identity: Mapping[str, str], nbytes: int) -> None:
        """Opens the shelf for the fit with this identity, whose state takes about `nbytes`.

        Raises `StateMismatch` if the shelf holds another fit.
        """
        self._identity = dict(identity)
        if isinstance(self._where, Shelf):
            self._shelf = self._where
        else:
            self._shelf = Shelf(self._path(), size=4 * nbytes + _SPARE_NBYTES)
        found = self.get("identity")
        if found is not None and found != self._identity:
            raise self._mismatch(found)
        self._stored = found is not None

    def close(self) -> None:
        """Waits for a commit under way, and closes the shelf unless it is the user's own."""
        try:
            self._settle()
        finally:
            if self._shelf is not None and self._shelf is not self._where:
                self._shelf.close()
            self._shelf = None

    def get(self, name: str) -> Any:
        """A value, or an array on the mapping, read-only; None if there is none."""
        return self._opened.get(self._prefix + name)

    def copy(self, name: str) -> Any:
        """An array of the shelf as memory of its own."""
        return np.array(self.get(name))

    def commit(self, changes: Mapping[str, Any], remove: Iterable[str] = ()) -> None:
        """Makes all changes durable together. The identity goes with the first ones."""
        self._commit(self._opened, changes, remove)

    def commit_soon(self, changes: Mapping[str, Any]) -> None:
        """`commit`, beside what the caller does next: arrays are copied. One commit is under way at a time.

        What goes wrong is raised by the next use of this record.
        """
        shelf = self._opened
        taken = {
            name: np.array(value) if isinstance(value, np.ndarray) else value
            for name, value in changes.items()
        }
        self._pending = Background(lambda: self._commit(shelf, taken), "everystep-fit")

    def _commit(self, shelf: Shelf, changes: Mapping[str, Any], remove: Iterable[str] = ()) -> None:
        with shelf.transaction():
            if not self._stored:
                shelf[self._prefix + "identity"] = self._identity
            for name in remove:
                if self._prefix + name in shelf:
                    del shelf[self._prefix + name]
            for name, value in changes.items():
                shelf[self._prefix + name] = value
        self._stored = True

    def _settle(self) -> None:
        """Waits for the commit under way; raises what went wrong with it, once."""
        if self._pending is not None:
            self._pending.wait()  # interrupted here, it is still the one to wait for
            pending, self._pending = self._pending, None
            pending.result()

    def names(self) -> list[str]:
        """All names of this fit."""
        return [name[len(self._prefix) :] for name in self._opened if name.startswith(self._prefix)]

    def commit_attributes(
        self, estimator: Any, beside: Mapping[str, Any], remove: Iterable[str] = ()
    ) -> None:
        """Commits everything that fitting has added to the estimator, and the values `beside` it."""
        parameters = estimator.get_params(deep=False)
        tree, arrays = take_apart(attributes_of(estimator), parameters)
        held = {f"attribute.{name}": array for name, array in arrays.items()}
        gone = {name for name in self.names() if name.startswith("attribute.")} - set(held)
        self.commit({"attributes": tree, **held, **beside}, remove=[*remove, *gone])

    def restore_attributes(self, estimator: Any) -> None:
        """Gives the estimator the attributes of the last `commit_attributes`."""
        start = len("attribute.")
        arrays = {n[start:]: self.get(n) for n in self.names() if n.startswith("attribute.")}
        parameters = estimator.get_params(deep=False)
        vars(estimator).update(put_together(self.get("attributes"), arrays, parameters))

    @property
    def _opened(self) -> Shelf:
        if self._shelf is None:
            raise RuntimeError("the record of a fit is used before it is open")
        self._settle()
        return self._shelf

    def _path(self) -> Path:
        text = os.fspath(self._where)  # type: ignore[arg-type]
        local_path(text)
        path = Path(text)
        if path.is_dir() or text.endswith(os.sep):
            path.mkdir(parents=True, exist_ok=True)
            return path / f"{of_identity(self._identity)}.shelf"
        return path

    def _mismatch(self, found: Mapping[str, str]) -> StateMismatch:
        here = self._identity
        differences = "; ".join(
            f"{name} is {found.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            for name in sorted({*found, *here})
            if found.get(name) != here.get(name)
        )
        return StateMismatch(
            f"the shelf {self._opened.path} holds another fit: fingerprint {of_identity(found)} there, "
            f"{of_identity(here)} here ({differences}). Nothing was changed. Give this fit a shelf of its "
            "own, or a directory as shelf, which holds one for each fit."
        )
