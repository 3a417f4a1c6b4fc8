"""What the processes of one save tell each other while they commit it. One process alone says nothing.

Owns the three messages of a commit, and the calls by which the driver sends and awaits them. Every process
makes the same calls: `open`, `collect`, `end`; or `failed` instead of those that are left.
`everystep.store.ranks.save_round` carries them between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from everystep.format.records import PartRef


class Opened(Struct, frozen=True):
    """Where to write. `recycle`: over files that are there. `dead`: checkpoints whose shards are to go.

    `identity` is the directory's, as `host` sees it: one that comes late may find another by that name.
    Names of directories need not be UTF-8, so it travels as bytes.
    """

    directory: bytes
    recycle: bool
    dead: tuple[str, ...] = ()
    host: str = ""
    identity: tuple[int, int, int] = (0, 0, 0)


class ShareWritten(Struct, frozen=True):
    """A rank's share is durable."""

    ref: PartRef
    files: tuple[str, ...]
    nbytes: int
    stored_nbytes: int
    plan: str
    """Of the plan that it was written by: all must have written by the same."""
    tree: bool
    """Whether the part has a tree of its own."""
    values: Mapping[str, str]
    """Digests of its plain values, by place."""
    facts: Mapping[str, str] = {}
    """Digests of all of them, if its tree is stored next to that of rank 0
    (`everystep.store.ranks.checks.values`)."""
    samples: Mapping[str, str] = {}
    """Digests of samples of its copies of arrays (`everystep.store.ranks.checks.replicas`)."""


class Committed(Struct, frozen=True):
    """Committed. `dead`: what it has replaced, whose shards are to go."""

    nbytes: int
    stored_nbytes: int
    leaves: int
    dead: tuple[str, ...] = ()


class Round:
    """The messages of one save. This is the round of one process, which is the coordinator of itself."""

    rank = 0
    world = 1

    @property
    def rejected(self) -> bool:
        """Whether the coordinator has said that nothing was committed, so nothing written is to stay."""
        return False

    def open(self, opened: Opened | None) -> Opened:
        """The coordinator says where to write; the others pass None. Returns what it said."""
        assert opened is not None
        return opened

    def collect(self, written: ShareWritten) -> list[ShareWritten]:
        """Says that this process has written its share.

        Returns what all have written, in the order of ranks, on the coordinator; on the others nothing.
        """
        return [written]

    def end(self, committed: Committed | None) -> Committed:
        """The coordinator says that the checkpoint is durable; the others pass None."""
        assert committed is not None
        return committed

    def failed(self, error: BaseException, *, maybe_committed: bool = False) -> None:
        """Says instead of all that is left to say that this process has failed."""

    def check(self) -> None:
        """Raises the coordinator's failure if it has reported one already."""

    def await_others(self) -> None:
        """After a failure, on the coordinator: waits a few seconds for the others to stop writing."""


ALONE = Round()
