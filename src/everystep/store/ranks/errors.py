"""How ranks tell each other what went wrong, so that all of them raise a fitting error.

If one rank alone meets a problem, that rank raises its own error and all others raise `RankFailed`. Some
problems concern all ranks: a damaged or missing checkpoint, a run that another process writes to, ranks that
disagree. Then every rank raises the same kind of error, so all go back to the same older checkpoint, or all
stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from msgspec import Struct

from everystep.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CorruptCheckpoint,
    EverystepError,
    IncompleteCheckpoint,
    Locked,
    RankFailed,
    RanksDisagree,
    RankTimeout,
    ReadFailed,
    RunInUse,
    as_save_failure,
)
from everystep.store.names import sendable
from everystep.store.read.read_errors import read_error, shows_damage


class AnotherCheckpoint(CorruptCheckpoint):
    """Ranks found different checkpoints at one path: it was replaced meanwhile, or they do not share it."""


_MAX_TEXT = 2000
_KINDS: tuple[tuple[str, type[EverystepError]], ...] = (
    # Of several failures the first of these counts for all; incomplete ones are damaged, too.
    ("another", AnotherCheckpoint),
    ("damaged", CorruptCheckpoint),
    ("unread", ReadFailed),
    ("refused", ReadFailed),
    ("absent", CheckpointNotFound),
    ("locked", Locked),
    ("exists", CheckpointExists),
    ("in use", RunInUse),
    ("disagree", RanksDisagree),
)
_OWN = ""
_SILENCE = "silence"
"""That a rank is not heard of. It counts last: other failures often explain it."""


class RankError(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="failure"):
    """The error of a rank, as a message. `kind` is one of those above.

    `maybe_committed`: the save may have been committed anyway, so its files must stay.
    """

    rank: int
    text: str
    type_name: str = ""
    kind: str = _OWN
    incomplete: bool = False
    path: str | None = None
    leaf: str | None = None
    errno: int | None = None
    ranks: tuple[int, ...] = ()
    maybe_committed: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException, *, maybe_committed: bool = False) -> RankError:
        text = error.reason if isinstance(error, CorruptCheckpoint) else str(error) or type(error).__name__
        path = leaf = number = None
        if isinstance(error, CorruptCheckpoint):
            path, leaf = error.path, error.leaf
        elif isinstance(error, ReadFailed):
            path = error.filename if isinstance(error.filename, str) else None
            number = error.errno
        return cls(
            rank=rank,
            text=_text(text),
            type_name=type(error).__name__,
            kind=kind_of(error),
            incomplete=isinstance(error, IncompleteCheckpoint),
            path=_text(path),
            leaf=_text(leaf),
            errno=number,
            ranks=error.ranks if isinstance(error, (RankFailed, RanksDisagree)) else (),
            maybe_committed=maybe_committed,
        )

    def error(self, what: str) -> EverystepError:
        """What the other ranks raise. `what`: what failed."""
        found = f"found by rank {self.rank}: {self.text}"
        if self.kind in ("unread", "refused"):
            return read_error(found, self.errno, self.path)
        if self.kind == "another":
            return AnotherCheckpoint(found, path=self.path)
        if self.kind == "damaged":
            damaged = IncompleteCheckpoint if self.incomplete else CorruptCheckpoint
            return damaged(found, path=self.path, leaf=self.leaf)
        if self.kind == "absent":
            return CheckpointNotFound(found)
        if self.kind == "locked":
            return Locked(found)
        if self.kind == "exists":
            return CheckpointExists(found)
        if self.kind == "in use":
            return RunInUse(found)
        if self.kind == "disagree":
            return RanksDisagree(self.text, ranks=self.ranks)
        failed = RankTimeout if self.kind == _SILENCE else RankFailed
        if self.ranks:
            return failed(self.text, ranks=self.ranks)
        return failed(f"{what} failed on rank {self.rank}: {self.type_name}: {self.text}", ranks=[self.rank])


@contextmanager
def failing_the_save() -> Iterator[None]:
    """A block of a save: turns errors of ranks into `SaveFailed`."""
    try:
        yield
    except (RankFailed, RanksDisagree) as error:
        failed = as_save_failure(error)
        try:
            if failed is error:
                raise
            raise failed from error
        finally:
            del failed  # else its traceback, which has this frame, would keep itself alive


def kind_of(error: BaseException) -> str:
    if isinstance(error, ReadFailed) and not shows_damage(error):
        return "refused"  # nothing is known of the checkpoint, so no rank goes on to an older one
    if isinstance(error, RankTimeout):
        return _SILENCE
    return next((kind for kind, known in _KINDS if isinstance(error, known)), _OWN)


def worst(errors: Sequence[RankError]) -> RankError:
    """The one that all ranks raise."""
    order = [*(kind for kind, _ in _KINDS), _OWN, _SILENCE]
    return min(errors, key=lambda error: (order.index(error.kind), error.rank))


def raise_worst(errors: Sequence[RankError], own: Exception | None, what: str) -> None:
    """Raises, if any rank failed: this rank's `own` error where that is of the fitting kind."""
    if not errors:
        return
    found = worst(errors)
    if own is not None and kind_of(own) == found.kind:
        raise own
    raise found.error(what) from own


@overload
def _text(text: str) -> str: ...
@overload
def _text(text: None) -> None: ...
def _text(text: str | None) -> str | None:
    """As much of a text as fits a message."""
    return None if text is None else sendable(text[:_MAX_TEXT])
