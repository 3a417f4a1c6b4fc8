"""`stream`: any estimator with ``partial_fit``, one batch after the other, each durable before the next.

What is stored, after every batch: the attributes of the estimator, the number of batches, and a checksum over
all of them. To go on, the estimator gets its attributes back, and batches that it has seen are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from everystep.errors import StateMismatch
from everystep.integrations.sklearn.estimator_state import attributes_of, take_apart
from everystep.integrations.sklearn.fingerprints import describe, of_parameters, of_text
from everystep.integrations.sklearn.record import FitRecord, ShelfLike
from everystep.integrations.sklearn.versions import VERSION

Estimator = TypeVar("Estimator")
BatchSource = Iterable[Any] | Callable[[int], Iterable[Any]]


def stream(estimator: Estimator, batches: BatchSource, *, shelf: ShelfLike, **options: Any) -> Estimator:
    """Calls ``partial_fit`` with each batch, and makes the result durable before the next.

    After a crash, call it again with a new estimator of the same parameters and the same batches: those that
    the shelf has seen are read, compared by checksum, and passed over.

    Args:
        estimator: Any estimator that has ``partial_fit``.
        batches: The batches. Each is ``X``, a tuple ``(X, y)`` or ``(X, y, sample_weight)``, or a dict of
            arguments. To avoid reading batches that were seen, give a function that takes the number of the
            first one wanted.
        shelf: The path of a shelf file, a directory (one shelf file for each stream), or an open
            `everystep.Shelf`.
        options: Arguments of every call, such as ``classes=[0, 1]``.

    Returns:
        The estimator.

    >>> import tempfile, numpy as np
    >>> from sklearn.naive_bayes import GaussianNB
    >>> batches = [(np.eye(2) * i, np.array([0, 1])) for i in range(1, 5)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = folder + "/stream.shelf"
    ...     half = stream(GaussianNB(), batches[:2], shelf=path, classes=[0, 1])
    ...     whole = stream(GaussianNB(), batches, shelf=path, classes=[0, 1])
    >>> whole.class_count_.tolist()
    [4.0, 4.0]
    """
    if not hasattr(estimator, "partial_fit"):
        raise TypeError(f"{type(estimator).__name__} has no partial_fit, so it cannot take batches")
    if shelf is None:
        raise ValueError("stream needs a shelf: a path, a directory or an open everystep.Shelf")
    record = FitRecord(shelf, "stream.")
    tree, arrays = _state(estimator)
    start = of_text(repr(tree) + "".join(map(describe, arrays.values()))) if tree else "none"
    identity = {
        "estimator": f"{type(estimator).__module__}.{type(estimator).__qualname__}",
        "scikit-learn": VERSION,
        "start": start,
        **of_parameters(estimator.get_params(deep=False)),  # type: ignore[attr-defined]
        **{f"option {name}": text for name, text in of_parameters(options).items()},
    }
    record.open(identity, nbytes=256 << 20)
    try:
        seen, checksum = record.get("seen") or (0, "")
        if seen:
            record.restore_attributes(estimator)
        for number, batch in _from(batches, seen, checksum):
            arguments = {**_arguments(batch), **options}
            estimator.partial_fit(**arguments)
            checksum = _next(checksum, batch)
            record.commit_attributes(estimator, {"seen": (number + 1, checksum)})
    finally:
        record.close()
    return estimator


def _from(batches: BatchSource, seen: int, checksum: str) -> Iterator[tuple[int, Any]]:
    """The batches after those that were seen, with their numbers."""
    if callable(batches):
        yield from enumerate(batches(seen), seen)
        return
    found = ""
    for number, batch in enumerate(batches):
        if number < seen:
            found = _next(found, batch)
            if number + 1 == seen and found != checksum:
                raise StateMismatch(
                    f"the shelf has seen other batches: the first {seen} have the fingerprint {checksum} "
                    f"there and {found} here. Nothing was changed. Give the same batches, or another shelf."
                )
        else:
            yield number, batch


def _next(checksum: str, batch: Any) -> str:
    parts = (f"{name} {describe(value)}" for name, value in _arguments(batch).items())
    return of_text(" ".join([checksum, *parts]))


def _arguments(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple):
        return dict(zip(("X", "y", "sample_weight"), batch, strict=False))
    return {"X": batch}


def _state(estimator: Any) -> tuple[Any, dict[str, Any]]:
    return take_apart(attributes_of(estimator), estimator.get_params(deep=False))
