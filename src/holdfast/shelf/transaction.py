"""The block of `Shelf.transaction`."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from holdfast.errors import ShelfClosed


class Changeable(Protocol):
    """What a transaction needs of its shelf."""

    @property
    def path(self) -> str: ...
    @property
    def _transaction(self) -> Transaction | None: ...
    def _begin(self, transaction: Transaction) -> None: ...
    def _commit(self, transaction: Transaction) -> None: ...
    def _end(self) -> None: ...


class Transaction:
    """Commits when the block ends, rolls back if it ends with an exception.

    `assigned` and `removed` are the names that it has changed so far.
    """

    __slots__ = ("_shelf", "assigned", "removed")

    def __init__(self, shelf: Changeable) -> None:
        self._shelf = shelf
        self.assigned: set[str] = set()
        self.removed: set[str] = set()

    def __enter__(self) -> Transaction:
        self._shelf._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shelf = self._shelf
        if shelf._transaction is not self:
            if kind is None:
                raise ShelfClosed(
                    f"the shelf {shelf.path} was closed inside of a transaction, which is undone"
                )
            return
        if kind is None:
            shelf._commit(self)
        else:
            shelf._end()
