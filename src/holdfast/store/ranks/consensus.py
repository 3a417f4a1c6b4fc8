"""How ranks tell each other what went wrong, so that all of them raise, and raise the fitting error.

What one rank alone has met is an error of its own there, and `RankFailed` on all others. But what is wrong
with the checkpoint, that there is none, or that somebody else writes to the run, is so for everybody: every
rank raises the same kind, so that all of them go on to the same older checkpoint, or all begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec

from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    HoldfastError,
    IncompleteCheckpoint,
    RankFailed,
    ReadFailed,
    RunLocked,
)
from holdfast.store.os_errors import read_error, shows_damage
from holdfast.team import Team, sendable
from holdfast.team.replies import all_heard


class AnotherCheckpoint(CorruptCheckpoint):
    """Ranks have found different checkpoints at one path: it was replaced meanwhile, or they do not share
    it."""


_MAX_TEXT = 2000
_KINDS: tuple[tuple[str, type[HoldfastError]], ...] = (
    # Of several failures the first of these counts for all; incomplete ones are damaged, too.
    ("another", AnotherCheckpoint),
    ("damaged", CorruptCheckpoint),
    ("unread", ReadFailed),
    ("refused", ReadFailed),
    ("absent", CheckpointNotFound),
    ("locked", RunLocked),
)
_OWN = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank has met. `kind` is one of those above, or empty for what is only that rank's own."""

    rank: int
    text: str
    kind: str = _OWN
    incomplete: bool = False
    path: str | None = None
    leaf: str | None = None
    errno: int | None = None
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, error: Exception) -> Failure:
        if isinstance(error, CorruptCheckpoint):
            return cls(
                rank=rank,
                text=_text(error.reason),
                kind=_kind(error),
                incomplete=isinstance(error, IncompleteCheckpoint),
                path=_text(error.path),
                leaf=_text(error.leaf),
            )
        text = _text(str(error) or type(error).__name__)
        if isinstance(error, ReadFailed):
            path = _text(error.filename) if isinstance(error.filename, str) else None
            return cls(rank=rank, text=text, kind=_kind(error), path=path, errno=error.errno)
        return cls(
            rank=rank,
            text=text,
            kind=_kind(error),
            ranks=error.ranks if isinstance(error, RankFailed) else (),
        )

    def error(self) -> HoldfastError:
        """What the other ranks raise."""
        what = f"found by rank {self.rank}: {self.text}"
        if self.kind in ("unread", "refused"):
            return read_error(what, self.errno, self.path)
        if self.kind == "another":
            return AnotherCheckpoint(what, path=self.path)
        if self.kind == "damaged":
            kind = IncompleteCheckpoint if self.incomplete else CorruptCheckpoint
            return kind(what, path=self.path, leaf=self.leaf)
        if self.kind == "absent":
            return CheckpointNotFound(what)
        if self.kind == "locked":
            return RunLocked(what)
        if self.ranks:
            return RankFailed(what, ranks=self.ranks)
        return RankFailed(
            f"rank {self.rank} failed, so this one gave up, too: {self.text}", ranks=[self.rank]
        )


def settle(team: Team, key: str, error: Exception | None, timeout: float) -> None:
    """Returns on all ranks if none has an error, raises on all if one has."""

    def decide(messages: Sequence[bytes | None]) -> bytes:
        found = [msgspec.msgpack.decode(message, type=Failure) for message in messages if message]
        if not found:
            all_heard(messages, key, timeout)
            return b""
        return msgspec.msgpack.encode(_worst(found))

    mine = b"" if error is None else msgspec.msgpack.encode(Failure.of(team.rank, error))
    verdict = team.agree(key, mine, decide, timeout)
    if verdict:
        give_up([msgspec.msgpack.decode(verdict, type=Failure)], error)


def give_up(failures: Sequence[Failure], error: Exception | None) -> None:
    """Raises what this rank has to, if any rank failed: its own error where that is of the fitting kind."""
    if not failures:
        return
    worst = _worst(failures)
    if error is not None and _kind(error) == worst.kind:
        raise error
    raise worst.error() from error


@overload
def _text(text: str) -> str: ...
@overload
def _text(text: None) -> None: ...
def _text(text: str | None) -> str | None:
    """As much of a text as fits a message."""
    return None if text is None else sendable(text[:_MAX_TEXT])


def _kind(error: Exception) -> str:
    if isinstance(error, ReadFailed) and not shows_damage(error):
        return "refused"  # nothing is known of the checkpoint, so nobody goes on to an older one
    return next((kind for kind, known in _KINDS if isinstance(error, known)), _OWN)


def _worst(failures: Sequence[Failure]) -> Failure:
    order = [*(kind for kind, _ in _KINDS), _OWN]
    return min(failures, key=lambda failure: (order.index(failure.kind), failure.rank))
